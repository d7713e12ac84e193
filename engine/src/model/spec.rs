//! An architecture as data: what its layers do, in order, and how the metadata's numbers are used.
//!
//! A [`Spec`] lists the operations of a layer. The tensors of a layer follow from them: an operation names the weight
//! that it takes, and the weight's role says its name in the file and its shape. Backends execute the list, or match it
//! with what they can do at once ([`super::dense`]) and refuse the rest by name.

use std::fmt;

use super::config::{Activation, Config, Pairing};

/// A buffer that operations pass on: one column of it for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// The queries of all heads.
    Query,
    /// The keys of all key and value heads.
    Key,
    /// The values of all key and value heads.
    Value,
    /// The gate half of a feed-forward block.
    Gate,
    /// The up half of a feed-forward block.
    Up,
    /// What a block adds to the residual stream.
    Added,
}

impl Buffer {
    /// All of them, in the order of their numbers.
    pub const ALL: [Buffer; 6] =
        [Buffer::Query, Buffer::Key, Buffer::Value, Buffer::Gate, Buffer::Up, Buffer::Added];

    /// Elements of a column.
    pub fn size(self) -> Size {
        match self {
            Buffer::Query => Size::Queries,
            Buffer::Key | Buffer::Value => Size::Keys,
            Buffer::Gate | Buffer::Up => Size::FeedForward,
            Buffer::Added => Size::Width,
        }
    }
}

/// A size that the metadata gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Elements of the residual stream.
    Width,
    /// Elements of all query heads.
    Queries,
    /// Elements of all key heads.
    Keys,
    /// Elements of a head.
    Head,
    /// Elements between the halves of a feed-forward block.
    FeedForward,
}

impl Size {
    /// The number in a model.
    pub fn of(self, config: &Config) -> usize {
        match self {
            Size::Width => config.width,
            Size::Queries => config.heads * config.head_width,
            Size::Keys => config.kv_heads * config.head_width,
            Size::Head => config.head_width,
            Size::FeedForward => config.feed_forward,
        }
    }
}

/// A matrix of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matrix {
    /// Query rows.
    Query,
    /// Key rows.
    Key,
    /// Value rows.
    Value,
    /// Rows of attention's output.
    Output,
    /// Gate rows of the feed-forward block.
    Gate,
    /// Up rows of the feed-forward block.
    Up,
    /// Down rows of the feed-forward block.
    Down,
}

impl Matrix {
    /// All of them, in the order of their numbers.
    pub const ALL: [Matrix; 7] =
        [Matrix::Query, Matrix::Key, Matrix::Value, Matrix::Output, Matrix::Gate, Matrix::Up, Matrix::Down];

    /// The name in the file after `blk.N.`, rows and columns.
    pub fn tensor(self) -> (&'static str, Size, Size) {
        match self {
            Matrix::Query => ("attn_q.weight", Size::Queries, Size::Width),
            Matrix::Key => ("attn_k.weight", Size::Keys, Size::Width),
            Matrix::Value => ("attn_v.weight", Size::Keys, Size::Width),
            Matrix::Output => ("attn_output.weight", Size::Width, Size::Queries),
            Matrix::Gate => ("ffn_gate.weight", Size::FeedForward, Size::Width),
            Matrix::Up => ("ffn_up.weight", Size::FeedForward, Size::Width),
            Matrix::Down => ("ffn_down.weight", Size::Width, Size::FeedForward),
        }
    }
}

/// A vector of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vector {
    /// Norm before attention.
    AttentionNorm,
    /// Added to the queries.
    QueryBias,
    /// Added to the keys.
    KeyBias,
    /// Added to the values.
    ValueBias,
    /// Norm of each query head.
    QueryNorm,
    /// Norm of each key head.
    KeyNorm,
    /// Norm of what attention adds.
    PostAttentionNorm,
    /// Norm before the feed-forward block.
    FeedForwardNorm,
    /// Norm of what the feed-forward block adds.
    PostFeedForwardNorm,
}

impl Vector {
    /// All of them, in the order of their numbers.
    pub const ALL: [Vector; 9] = [
        Vector::AttentionNorm,
        Vector::QueryBias,
        Vector::KeyBias,
        Vector::ValueBias,
        Vector::QueryNorm,
        Vector::KeyNorm,
        Vector::PostAttentionNorm,
        Vector::FeedForwardNorm,
        Vector::PostFeedForwardNorm,
    ];

    /// The name in the file after `blk.N.`, and the length.
    pub fn tensor(self) -> (&'static str, Size) {
        match self {
            Vector::AttentionNorm => ("attn_norm.weight", Size::Width),
            Vector::QueryBias => ("attn_q.bias", Size::Queries),
            Vector::KeyBias => ("attn_k.bias", Size::Keys),
            Vector::ValueBias => ("attn_v.bias", Size::Keys),
            Vector::QueryNorm => ("attn_q_norm.weight", Size::Head),
            Vector::KeyNorm => ("attn_k_norm.weight", Size::Head),
            Vector::PostAttentionNorm => ("post_attention_norm.weight", Size::Width),
            Vector::FeedForwardNorm => ("ffn_norm.weight", Size::Width),
            Vector::PostFeedForwardNorm => ("post_ffw_norm.weight", Size::Width),
        }
    }
}

/// A block of a layer: what an error names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// Attention.
    Attention,
    /// The feed-forward block.
    FeedForward,
}

/// An operation of a layer. *The input* is the quantised activations that the next multiplication takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// The input is the RMS norm of the residual stream, times a weight.
    Norm(Vector),
    /// Each buffer is its matrix times the input.
    Multiply(&'static [(Matrix, Buffer)]),
    /// A bias is added to the buffer.
    Bias(Buffer, Vector),
    /// Each head of the buffer is replaced by its RMS norm, times a weight.
    HeadNorm(Buffer, Vector),
    /// Each head of the buffer is rotated by its position.
    Rope(Buffer),
    /// Key and value go to the cache, as halves.
    Store,
    /// The input is attention of the queries over the cache.
    Attend,
    /// The input is the activation of the gate, times up.
    GatedActivation,
    /// What is to be added is replaced by its RMS norm, times a weight.
    PostNorm(Vector),
    /// What a block adds joins the residual stream, which is checked.
    Add(Block),
}

impl Op {
    /// The vector that the operation takes, if it takes one.
    pub fn vector(self) -> Option<Vector> {
        match self {
            Op::Norm(vector) | Op::Bias(_, vector) | Op::HeadNorm(_, vector) | Op::PostNorm(vector) => {
                Some(vector)
            }
            _ => None,
        }
    }

    /// The matrices that the operation takes.
    pub fn matrices(self) -> impl Iterator<Item = Matrix> {
        let products = if let Op::Multiply(products) = self { products } else { &[] };
        products.iter().map(|(matrix, _)| *matrix)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What embeddings are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbeddingScale {
    /// Nothing.
    One,
    /// The root of the width.
    RootOfWidth,
}

/// Layers that see a window of positions only, in between those that see all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalLayers {
    /// Every layer whose number plus one is a multiple of this is global, if the file does not say.
    pub global_every: usize,
    /// The base of their rotary frequencies, if the file does not say.
    pub rope_base: f64,
}

/// An architecture.
#[derive(Debug, PartialEq)]
pub struct Spec {
    /// `general.architecture` in the file, and the beginning of its keys.
    pub name: &'static str,
    /// Which elements of a head are rotated together.
    pub pairing: Pairing,
    /// The activation of the feed-forward block.
    pub activation: Activation,
    /// What embeddings are multiplied by.
    pub embedding_scale: EmbeddingScale,
    /// Local layers, if there are any.
    pub local: Option<LocalLayers>,
    /// A model of this many layers scales scores by `width / heads` instead of by its heads' own width.
    pub scores_by_width_at: Option<usize>,
    /// The operations of a layer.
    pub layer: &'static [Op],
    /// Vectors that a file may lack; the operations that take them are left out then.
    pub optional: &'static [Vector],
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}
