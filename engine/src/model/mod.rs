//! A model file: its shape, and each tensor that the shape asks for, checked before anything is loaded.

pub mod architectures;
mod config;
pub mod dense;
pub mod spec;

use std::cell::RefCell;
use std::collections::BTreeSet;

use kiln_kernels::math;

pub use config::{Activation, Config, Pairing, Rope};
pub use spec::{Block, Buffer, Matrix, Op, Vector};

use crate::error::{Error, Result};
use crate::gguf::{Gguf, Tensor, TensorType};
use crate::quant;

/// A layer: what it does, and the tensors for it.
#[derive(Clone, Debug)]
pub struct Layer {
    ops: Vec<Op>,
    matrices: [Option<Tensor>; Matrix::ALL.len()],
    vectors: [Option<Vec<f32>>; Vector::ALL.len()],
}

impl Layer {
    /// The operations in order; all that they take is there.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// A matrix, if an operation takes it.
    pub fn matrix(&self, matrix: Matrix) -> Option<&Tensor> {
        self.matrices[matrix as usize].as_ref()
    }

    /// All matrices that operations take.
    pub fn matrices(&self) -> impl Iterator<Item = &Tensor> {
        self.matrices.iter().flatten()
    }

    /// The vector of one of the layer's own operations.
    ///
    /// # Panics
    /// No operation of the layer takes it.
    pub fn weight(&self, vector: Vector) -> &[f32] {
        let Some(values) = self.vector(vector) else { panic!("no operation of the layer takes {vector:?}") };
        values
    }

    /// A vector, if an operation takes it.
    pub fn vector(&self, vector: Vector) -> Option<&[f32]> {
        self.vectors[vector as usize].as_deref()
    }
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
    let mut layer = Layer { ops: Vec::new(), matrices: Default::default(), vectors: Default::default() };
    for op in config.spec.layer {
        if let Some(role) = op.vector() {
            let (name, len) = role.tensor();
            let name = format!("blk.{index}.{name}");
            if config.spec.optional.contains(&role) && tensors.optional(&name).is_none() {
                continue;
            }
            layer.vectors[role as usize] = Some(tensors.vector(&name, len.of(config))?);
        }
        for role in op.matrices() {
            let (name, rows, columns) = role.tensor();
            let tensor =
                tensors.matrix(&format!("blk.{index}.{name}"), rows.of(config), columns.of(config))?;
            layer.matrices[role as usize] = Some(tensor);
        }
        layer.ops.push(*op);
    }
    Ok(layer)
}

/// Tensors of a layer that files hold and no operation needs: tables that converters once stored and that are computed
/// from the metadata.
const HARMLESS: [&str; 2] = ["rope_freqs.weight", "attn_rot_embd.weight"];

/// Whether a tensor is `blk.N.` and one of [`HARMLESS`]. The model's own `rope_freqs.weight` is none: it is used.
fn is_harmless(name: &str) -> bool {
    name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).is_some_and(|(layer, tensor)| {
        layer.bytes().all(|byte| byte.is_ascii_digit()) && HARMLESS.contains(&tensor)
    })
}

struct Tensors<'a> {
    file: &'a Gguf,
    /// The names that were asked for.
    used: RefCell<BTreeSet<String>>,
}

impl Tensors<'_> {
    /// A tensor that nothing uses means that the model computes something else than its file says.
    fn check_unused(&self) -> Result<()> {
        let used = self.used.borrow();
        match self.file.tensors().keys().find(|name| !used.contains(*name) && !is_harmless(name)) {
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
