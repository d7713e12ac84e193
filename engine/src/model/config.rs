//! What a file's metadata says about the shape of its model.

use std::fmt;

use super::architectures;
use super::spec::{EmbeddingScale, Spec};
use crate::error::{Error, Result};
use crate::gguf::Gguf;

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Elements 2i and 2i + 1.
    Adjacent,
    /// Elements i and i + half of the rotated ones.
    Halves,
}

/// Rotary positions of a kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Rotated elements of a head, even and at most the head's width.
    pub dimensions: usize,
    /// Frequency i is `base^(-2i / dimensions)`, divided by `scale`.
    pub base: f64,
    /// Linear scaling: positions are divided by this.
    pub scale: f64,
}

/// The activation between the two halves of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}

/// The shape of a model. All sizes are checked: none is zero, and products fit memory arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The architecture.
    pub spec: &'static Spec,
    /// Layers.
    pub layers: usize,
    /// Elements of the residual stream.
    pub width: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Key and value heads of a layer; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_width: usize,
    /// Elements between the halves of a feed-forward block.
    pub feed_forward: usize,
    /// Positions that the model was trained for.
    pub trained_context: usize,
    /// Added to the mean square in norms.
    pub epsilon: f32,
    /// Which elements are rotated together.
    pub pairing: Pairing,
    /// Positions in global layers.
    pub rope: Rope,
    /// Positions in local layers, in models that have them.
    pub local_rope: Option<Rope>,
    /// Local layers see this many positions, their own included.
    pub window: usize,
    /// Every layer whose number plus one is a multiple of this is global; 1 makes all so.
    pub global_every: usize,
    /// Scores are multiplied by this.
    pub attention_scale: f32,
    /// Embeddings are multiplied by this.
    pub embedding_scale: f32,
    /// The feed-forward activation.
    pub activation: Activation,
}

/// Larger than any published model; keeps products of two sizes far from 2^63.
const LARGEST: u64 = 1 << 24;

impl Config {
    /// Reads the metadata.
    ///
    /// # Errors
    /// [`Error::Model`] if the family is not supported, or a value is missing, out of range or contradicts another.
    pub fn from_gguf(file: &Gguf) -> Result<Config> {
        let name = file
            .string("general.architecture")?
            .ok_or_else(|| Error::Model(format!("{} has no general.architecture", file.name())))?;
        let spec = architectures::ALL.into_iter().find(|spec| spec.name == name).ok_or_else(|| {
            let supported = architectures::ALL.map(|spec| spec.name).join(", ");
            Error::Model(format!("architecture {name:?} is not supported; these are: {supported}"))
        })?;
        let keys = Keys { file, prefix: name };
        let layers = keys.size("block_count")?;
        let width = keys.size("embedding_length")?;
        let heads = keys.size("attention.head_count")?;
        let kv_heads = keys.optional_size("attention.head_count_kv")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(keys.wrong(
                "attention.head_count_kv",
                kv_heads,
                &format!("a divisor of {heads} heads"),
            ));
        }
        let head_width = match keys.optional_size("attention.key_length")? {
            Some(length) => length,
            None if width.is_multiple_of(heads) => width / heads,
            None => return Err(keys.wrong("attention.head_count", heads, &format!("a divisor of {width}"))),
        };
        let value_width = keys.optional_size("attention.value_length")?.unwrap_or(head_width);
        if value_width != head_width {
            return Err(keys.wrong(
                "attention.value_length",
                value_width,
                "the same as attention.key_length",
            ));
        }
        if head_width > 1024 {
            return Err(keys.wrong("attention.key_length", head_width, "at most 1024"));
        }
        let dimensions = keys.optional_size("rope.dimension_count")?.unwrap_or(head_width);
        if dimensions > head_width || !dimensions.is_multiple_of(2) {
            let expected = format!("an even number up to {head_width}");
            return Err(keys.wrong("rope.dimension_count", dimensions, &expected));
        }
        if file.integer(&format!("{name}.expert_count"))?.unwrap_or(0) > 0 {
            return Err(Error::Model("mixtures of experts are not supported".into()));
        }
        let epsilon = keys.float("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5);
        let base = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
        if !(base > 0.0 && base.is_finite() && (0.0..1.0).contains(&epsilon)) {
            return Err(Error::Model(format!("rope.freq_base is {base} and the norms' epsilon {epsilon}")));
        }
        let rope = Rope { dimensions, base, scale: keys.rope_scale()? };
        let (mut local_rope, mut window, mut global_every) = (None, usize::MAX, 1);
        // An architecture without local layers ignores the keys of a window, as its reference does.
        let stated_window = keys.optional_size("attention.sliding_window")?;
        let stated_base = keys.float("rope.freq_base_swa")?;
        if let Some(local) = spec.local {
            let base = stated_base.unwrap_or(local.rope_base);
            local_rope = Some(Rope { dimensions, base, scale: 1.0 });
            window = stated_window.unwrap_or(usize::MAX);
            global_every =
                keys.optional_size("attention.sliding_window_pattern")?.unwrap_or(local.global_every);
        }
        let scaled_width = if spec.scores_by_width_at == Some(layers) { width / heads } else { head_width };
        Ok(Config {
            spec,
            layers,
            width,
            heads,
            kv_heads,
            head_width,
            feed_forward: keys.size("feed_forward_length")?,
            trained_context: keys.size("context_length")?,
            epsilon: epsilon as f32,
            pairing: spec.pairing,
            rope,
            local_rope,
            window,
            global_every,
            attention_scale: (1.0 / (scaled_width as f64).sqrt()) as f32,
            embedding_scale: match spec.embedding_scale {
                EmbeddingScale::One => 1.0,
                EmbeddingScale::RootOfWidth => (width as f64).sqrt() as f32,
            },
            activation: spec.activation,
        })
    }

    /// Whether a layer, from 0, sees all positions.
    pub fn is_global(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.global_every)
    }

    /// The first position that `position` sees in a layer.
    pub fn first_visible(&self, layer: usize, position: usize) -> usize {
        if self.is_global(layer) { 0 } else { (position + 1).saturating_sub(self.window) }
    }
}

struct Keys<'a> {
    file: &'a Gguf,
    prefix: &'a str,
}

impl Keys<'_> {
    fn wrong(&self, key: &str, found: impl fmt::Display, expected: &str) -> Error {
        Error::Model(format!("{}.{key} is {found}, expected {expected}", self.prefix))
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        match self.file.integer(&format!("{}.{key}", self.prefix))? {
            None => Ok(None),
            Some(value) if (1..=LARGEST).contains(&value) => Ok(Some(value as usize)),
            Some(value) => Err(self.wrong(key, value, &format!("1 to {LARGEST}"))),
        }
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?
            .ok_or_else(|| Error::Model(format!("{} has no {}.{key}", self.file.name(), self.prefix)))
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        self.file.float(&format!("{}.{key}", self.prefix))
    }

    fn rope_scale(&self) -> Result<f64> {
        let kind = self.file.string(&format!("{}.rope.scaling.type", self.prefix))?;
        let factor = match self.float("rope.scaling.factor")? {
            Some(factor) => factor,
            None => self.float("rope.scale_linear")?.unwrap_or(1.0),
        };
        match kind {
            None | Some("none" | "linear") if factor > 0.0 && factor.is_finite() => {
                Ok(if kind == Some("none") { 1.0 } else { factor })
            }
            None | Some("none" | "linear") => {
                Err(self.wrong("rope.scaling.factor", factor, "a positive number"))
            }
            Some(other) => {
                Err(self.wrong("rope.scaling.type", format!("{other:?}"), "\"none\" or \"linear\""))
            }
        }
    }
}
