//! The architectures that are served.

use super::config::{Activation, Pairing};
use super::spec::{Block, Buffer, EmbeddingScale, LocalLayers, Matrix, Op, Spec, Vector};

/// All of them.
pub const ALL: [&Spec; 4] = [&LLAMA, &QWEN2, &QWEN3, &GEMMA3];

const QUERY_KEY_VALUE: Op = Op::Multiply(&[
    (Matrix::Query, Buffer::Query),
    (Matrix::Key, Buffer::Key),
    (Matrix::Value, Buffer::Value),
]);
const OUTPUT: Op = Op::Multiply(&[(Matrix::Output, Buffer::Added)]);
const GATE_UP: Op = Op::Multiply(&[(Matrix::Gate, Buffer::Gate), (Matrix::Up, Buffer::Up)]);
const DOWN: Op = Op::Multiply(&[(Matrix::Down, Buffer::Added)]);

const BIASES: &[Vector] = &[Vector::QueryBias, Vector::KeyBias, Vector::ValueBias];

/// Norm, attention with biases, norm, gated feed-forward.
const PLAIN: &[Op] = &[
    Op::Norm(Vector::AttentionNorm),
    QUERY_KEY_VALUE,
    Op::Bias(Buffer::Query, Vector::QueryBias),
    Op::Bias(Buffer::Key, Vector::KeyBias),
    Op::Bias(Buffer::Value, Vector::ValueBias),
    Op::Rope(Buffer::Query),
    Op::Rope(Buffer::Key),
    Op::Store,
    Op::Attend,
    OUTPUT,
    Op::Add(Block::Attention),
    Op::Norm(Vector::FeedForwardNorm),
    GATE_UP,
    Op::GatedActivation,
    DOWN,
    Op::Add(Block::FeedForward),
];

/// Llama 1 to 3 and what is built like them.
pub static LLAMA: Spec = Spec {
    name: "llama",
    pairing: Pairing::Adjacent,
    activation: Activation::Silu,
    embedding_scale: EmbeddingScale::One,
    local: None,
    scores_by_width_at: None,
    layer: PLAIN,
    optional: BIASES,
};

/// Qwen2: biases on query, key and value.
pub static QWEN2: Spec = Spec { name: "qwen2", pairing: Pairing::Halves, optional: &[], ..LLAMA };

/// Qwen3: query and key are normalised in each head.
pub static QWEN3: Spec = Spec {
    name: "qwen3",
    pairing: Pairing::Halves,
    layer: &[
        Op::Norm(Vector::AttentionNorm),
        QUERY_KEY_VALUE,
        Op::Bias(Buffer::Query, Vector::QueryBias),
        Op::Bias(Buffer::Key, Vector::KeyBias),
        Op::Bias(Buffer::Value, Vector::ValueBias),
        Op::HeadNorm(Buffer::Query, Vector::QueryNorm),
        Op::HeadNorm(Buffer::Key, Vector::KeyNorm),
        Op::Rope(Buffer::Query),
        Op::Rope(Buffer::Key),
        Op::Store,
        Op::Attend,
        OUTPUT,
        Op::Add(Block::Attention),
        Op::Norm(Vector::FeedForwardNorm),
        GATE_UP,
        Op::GatedActivation,
        DOWN,
        Op::Add(Block::FeedForward),
    ],
    ..LLAMA
};

/// Gemma3, text only: norms after each block, local and global layers.
pub static GEMMA3: Spec = Spec {
    name: "gemma3",
    pairing: Pairing::Halves,
    activation: Activation::GeluTanh,
    embedding_scale: EmbeddingScale::RootOfWidth,
    local: Some(LocalLayers { global_every: 6, rope_base: 10_000.0 }),
    // The largest Gemma 3.
    scores_by_width_at: Some(62),
    layer: &[
        Op::Norm(Vector::AttentionNorm),
        QUERY_KEY_VALUE,
        Op::Bias(Buffer::Query, Vector::QueryBias),
        Op::Bias(Buffer::Key, Vector::KeyBias),
        Op::Bias(Buffer::Value, Vector::ValueBias),
        Op::HeadNorm(Buffer::Query, Vector::QueryNorm),
        Op::HeadNorm(Buffer::Key, Vector::KeyNorm),
        Op::Rope(Buffer::Query),
        Op::Rope(Buffer::Key),
        Op::Store,
        Op::Attend,
        OUTPUT,
        Op::PostNorm(Vector::PostAttentionNorm),
        Op::Add(Block::Attention),
        Op::Norm(Vector::FeedForwardNorm),
        GATE_UP,
        Op::GatedActivation,
        DOWN,
        Op::PostNorm(Vector::PostFeedForwardNorm),
        Op::Add(Block::FeedForward),
    ],
    optional: BIASES,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_list_makes_what_it_takes() {
        for spec in ALL {
            let mut made = Vec::new();
            let mut blocks = Vec::new();
            for op in spec.layer {
                let takes =
                    |buffer: &Buffer| assert!(made.contains(buffer), "{spec}: {op} before {buffer:?}");
                match op {
                    Op::Multiply(products) => made.extend(products.iter().map(|(_, buffer)| *buffer)),
                    Op::Bias(buffer, _) | Op::HeadNorm(buffer, _) | Op::Rope(buffer) => takes(buffer),
                    Op::Store => [Buffer::Key, Buffer::Value].iter().for_each(takes),
                    Op::Attend => takes(&Buffer::Query),
                    Op::GatedActivation => [Buffer::Gate, Buffer::Up].iter().for_each(takes),
                    Op::PostNorm(_) => takes(&Buffer::Added),
                    Op::Add(block) => {
                        takes(&Buffer::Added);
                        made.clear();
                        blocks.push(*block);
                    }
                    Op::Norm(_) => {}
                }
            }
            assert_eq!(blocks, [Block::Attention, Block::FeedForward], "{spec}");
            let taken: Vec<Vector> = spec.layer.iter().filter_map(|op| op.vector()).collect();
            assert!(spec.optional.iter().all(|vector| taken.contains(vector)), "{spec}");
        }
        for (number, matrix) in Matrix::ALL.into_iter().enumerate() {
            assert_eq!(matrix as usize, number);
        }
        for (number, vector) in Vector::ALL.into_iter().enumerate() {
            assert_eq!(vector as usize, number);
        }
        for (number, buffer) in Buffer::ALL.into_iter().enumerate() {
            assert_eq!(buffer as usize, number);
        }
    }
}
