//! A model file: its shape, and each tensor that the shape asks for, checked before anything is loaded.

mod config;

use std::cell::RefCell;
use std::collections::BTreeSet;

use kiln_kernels::math;

pub use config::{Activation, Architecture, Config, Pairing, Rope};

use crate::error::{Error, Result};
use crate::gguf::{Gguf, Tensor, TensorType};
use crate::quant;

/// The tensors of a layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attention_norm: Vec<f32>,
    /// Query rows: `heads * head_width` by `width`.
    pub query: Tensor,
    /// Key rows: `kv_heads * head_width` by `width`.
    pub key: Tensor,
    /// Value rows: `kv_heads * head_width` by `width`.
    pub value: Tensor,
    /// Added to the queries.
    pub query_bias: Option<Vec<f32>>,
    /// Added to the keys.
    pub key_bias: Option<Vec<f32>>,
    /// Added to the values.
    pub value_bias: Option<Vec<f32>>,
    /// Norm of each query head.
    pub query_norm: Option<Vec<f32>>,
    /// Norm of each key head.
    pub key_norm: Option<Vec<f32>>,
    /// Output rows: `width` by `heads * head_width`.
    pub output: Tensor,
    /// Norm of what attention adds.
    pub post_attention_norm: Option<Vec<f32>>,
    /// Norm before the feed-forward block.
    pub feed_forward_norm: Vec<f32>,
    /// Gate rows: `feed_forward` by `width`.
    pub gate: Tensor,
    /// Up rows: `feed_forward` by `width`.
    pub up: Tensor,
    /// Down rows: `width` by `feed_forward`.
    pub down: Tensor,
    /// Norm of what the feed-forward block adds.
    pub post_feed_forward_norm: Option<Vec<f32>>,
}

/// A checked model file. Cheap to clone: the bytes are shared.
#[derive(Clone, Debug)]
pub struct Model {
    /// The file.
    pub file: Gguf,
    /// The shape.
    pub config: Config,
    /// The embedding table: a row of `width` for each token.
    pub embedding: Tensor,
    /// The layers.
    pub layers: Vec<Layer>,
    /// The last norm.
    pub output_norm: Vec<f32>,
    /// The logits' rows: the embedding table again in many models.
    pub head: Tensor,
    /// Divides each frequency of global layers, as in Llama 3 files; one for each pair of a head.
    pub frequency_factors: Option<Vec<f32>>,
}

impl Model {
    /// Finds and checks all tensors.
    ///
    /// # Errors
    /// [`Error::Model`] if the family is not supported, or a tensor is missing or of another shape than the metadata
    /// asks for.
    pub fn from_gguf(file: Gguf) -> Result<Model> {
        let name = file.name().to_string();
        Model::read(file).map_err(|error| error.naming(&name))
    }

    fn read(file: Gguf) -> Result<Model> {
        let config = Config::from_gguf(&file)?;
        let tensors = Tensors { file: &file, used: RefCell::default() };
        let embedding = tensors.any("token_embd.weight")?.clone();
        let vocabulary = embedding.rows();
        tensors.matrix("token_embd.weight", vocabulary, config.width)?;
        let head = match tensors.optional("output.weight") {
            Some(_) => tensors.matrix("output.weight", vocabulary, config.width)?,
            None => embedding.clone(),
        };
        // Memory for the list is bounded by the file, not by the number in its metadata.
        if config.layers > file.tensors().len() {
            let problem =
                format!("{} layers, and the file has {} tensors", config.layers, file.tensors().len());
            return Err(Error::Model(problem));
        }
        let layers =
            (0..config.layers).map(|index| layer(&tensors, &config, index)).collect::<Result<_>>()?;
        let output_norm = tensors.vector("output_norm.weight", config.width)?;
        let frequency_factors = match tensors.optional("rope_freqs.weight") {
            Some(_) => Some(tensors.vector("rope_freqs.weight", config.rope.dimensions / 2)?),
            None => None,
        };
        if let Some(factors) = &frequency_factors
            && !factors.iter().all(|factor| factor.is_finite() && *factor > 0.0)
        {
            return Err(Error::Model(
                "rope_freqs.weight holds a factor that is not a positive number".into(),
            ));
        }
        tensors.check_unused()?;
        Ok(Model { config, embedding, layers, output_norm, head, frequency_factors, file })
    }

    /// Tokens that the model knows.
    pub fn vocabulary(&self) -> usize {
        self.embedding.rows()
    }

    /// Cosines and sines of `count` positions in global or local layers: `dimensions / 2` pairs a position.
    ///
    /// Computed in f64 by `kiln_kernels`' own series and rounded once, so that every machine has the same table.
    pub fn rope_table(&self, global: bool, count: usize) -> Vec<[f32; 2]> {
        let rope = match &self.config.local_rope {
            Some(local) if !global => local,
            _ => &self.config.rope,
        };
        let pairs = rope.dimensions / 2;
        let frequencies: Vec<f64> = (0..pairs)
            .map(|pair| {
                let frequency = math::powf(rope.base, -2.0 * pair as f64 / rope.dimensions as f64);
                let factor = match &self.frequency_factors {
                    Some(factors) if global => f64::from(factors[pair]),
                    _ => 1.0,
                };
                frequency / factor / rope.scale
            })
            .collect();
        let mut table = Vec::with_capacity(count * pairs);
        for position in 0..count {
            table.extend(frequencies.iter().map(|frequency| {
                let (sin, cos) = math::sin_cos(position as f64 * frequency);
                [cos as f32, sin as f32]
            }));
        }
        table
    }
}

fn layer(tensors: &Tensors<'_>, config: &Config, index: usize) -> Result<Layer> {
    let name = |part: &str| format!("blk.{index}.{part}");
    let matrix = |part: &str, rows, columns| tensors.matrix(&name(part), rows, columns);
    let vector = |part: &str, len| tensors.vector(&name(part), len);
    let optional = |part: &str, len| match tensors.optional(&name(part)) {
        Some(_) => vector(part, len).map(Some),
        None => Ok(None),
    };
    let required = |part: &str, len, when: bool| if when { vector(part, len).map(Some) } else { Ok(None) };
    // Qwen2 always has these; others may.
    let bias = |part: &str, len| match config.architecture {
        Architecture::Qwen2 => vector(part, len).map(Some),
        _ => optional(part, len),
    };
    let (width, head) = (config.width, config.head_width);
    let (queries, keys) = (config.heads * head, config.kv_heads * head);
    let head_norms = matches!(config.architecture, Architecture::Qwen3 | Architecture::Gemma3);
    let post_norms = config.architecture == Architecture::Gemma3;
    Ok(Layer {
        attention_norm: vector("attn_norm.weight", width)?,
        query: matrix("attn_q.weight", queries, width)?,
        key: matrix("attn_k.weight", keys, width)?,
        value: matrix("attn_v.weight", keys, width)?,
        query_bias: bias("attn_q.bias", queries)?,
        key_bias: bias("attn_k.bias", keys)?,
        value_bias: bias("attn_v.bias", keys)?,
        query_norm: required("attn_q_norm.weight", head, head_norms)?,
        key_norm: required("attn_k_norm.weight", head, head_norms)?,
        output: matrix("attn_output.weight", width, queries)?,
        post_attention_norm: required("post_attention_norm.weight", width, post_norms)?,
        feed_forward_norm: vector("ffn_norm.weight", width)?,
        gate: matrix("ffn_gate.weight", config.feed_forward, width)?,
        up: matrix("ffn_up.weight", config.feed_forward, width)?,
        down: matrix("ffn_down.weight", width, config.feed_forward)?,
        post_feed_forward_norm: required("post_ffw_norm.weight", width, post_norms)?,
    })
}

/// Endings of tensor names that files hold and no operation needs: tables that converters once stored and that
/// are computed from the metadata.
const HARMLESS: [&str; 2] = ["rope_freqs.weight", "attn_rot_embd.weight"];

struct Tensors<'a> {
    file: &'a Gguf,
    /// The names that were asked for.
    used: RefCell<BTreeSet<String>>,
}

impl Tensors<'_> {
    /// A tensor that nothing uses means that the model computes something else than its file says.
    fn check_unused(&self) -> Result<()> {
        let used = self.used.borrow();
        // The model's own `rope_freqs.weight` is used; a layer's copy of it is not.
        let harmless =
            |name: &str| name.starts_with("blk.") && HARMLESS.iter().any(|end| name.ends_with(end));
        match self.file.tensors().keys().find(|name| !used.contains(*name) && !harmless(name)) {
            Some(name) => Err(Error::Model(format!("tensor {name} is not used by this architecture"))),
            None => Ok(()),
        }
    }

    fn optional(&self, name: &str) -> Option<&Tensor> {
        self.used.borrow_mut().insert(name.to_string());
        self.file.tensors().get(name)
    }

    fn any(&self, name: &str) -> Result<&Tensor> {
        self.optional(name).ok_or_else(|| Error::Model(format!("{} has no tensor {name}", self.file.name())))
    }

    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Tensor> {
        let tensor = self.any(name)?;
        if tensor.columns() != columns || tensor.rows() != rows {
            let problem = format!("tensor {name} is {:?}, expected [{columns}, {rows}]", tensor.shape);
            return Err(Error::Model(problem));
        }
        Ok(tensor.clone())
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let tensor = self.matrix(name, 1, len)?;
        if !matches!(tensor.kind, TensorType::F32 | TensorType::F16 | TensorType::Bf16) {
            let problem = format!("tensor {name} is {}, expected F32, F16 or BF16", tensor.kind);
            return Err(Error::Model(problem));
        }
        let mut values = vec![0.0; len];
        quant::decode(tensor.kind, self.file.data(&tensor), &mut values);
        Ok(values)
    }
}
