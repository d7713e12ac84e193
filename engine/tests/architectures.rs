//! Each architecture against a forward pass in double precision that shares nothing with the engine.
//!
//! `architectures.py` makes the models and the logits.

use kiln_engine::backend::cpu::{Cpu, Options};
use kiln_engine::backend::{Backend, Wanted};
use kiln_engine::gguf::Gguf;
use kiln_engine::model::Model;

fn check(name: &str, bytes: &[u8]) {
    let expected = Gguf::from_vec("logits", include_bytes!("fixtures/logits.gguf").to_vec()).expect("a file");
    let tokens: Vec<u32> =
        expected.integers("tokens").expect("integers").expect("there").iter().map(|id| *id as u32).collect();
    let want: Vec<f32> = expected
        .data(&expected.tensors()[name])
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")))
        .collect();
    let model = Model::from_gguf(Gguf::from_vec(name, bytes.to_vec()).expect("a file")).expect("a model");
    let mut backend = Cpu::load(model, Options::new(16, 2)).expect("it loads");
    backend.run(&tokens, 0, Wanted::All).expect("a step");
    let largest = want.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let furthest = backend.logits().iter().zip(&want).fold(0f32, |far, (a, b)| far.max((a - b).abs()));
    // Halves in the cache are the only coarse rounding: 2^-11 of a value.
    assert!(furthest < 2e-3 * largest, "{name}: off by {furthest} of {largest}");
}

#[test]
fn llama_with_frequency_factors() {
    check("llama", include_bytes!("fixtures/llama.gguf"));
}

#[test]
fn qwen2_with_biases() {
    check("qwen2", include_bytes!("fixtures/qwen2.gguf"));
}

#[test]
fn qwen3_with_head_norms() {
    check("qwen3", include_bytes!("fixtures/qwen3.gguf"));
}

#[test]
fn gemma3_with_local_and_global_layers() {
    check("gemma3", include_bytes!("fixtures/gemma3.gguf"));
}

/// What loading says when the fixture's tensor `from` has the name `to` instead.
fn renamed(bytes: &[u8], from: &str, to: &str) -> String {
    assert_eq!(from.len(), to.len(), "names of one length");
    let mut bytes = bytes.to_vec();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect("the tensor");
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    let file = Gguf::from_vec("renamed", bytes).expect("a file");
    Model::from_gguf(file).err().map_or("no error".into(), |error| error.to_string())
}

#[test]
fn a_tensor_that_nothing_uses_is_an_error_that_names_it() {
    let found = renamed(include_bytes!("fixtures/llama.gguf"), "rope_freqs.weight", "rope_freqz.weight");
    assert!(found.contains("rope_freqz.weight"), "{found}");
}

#[test]
fn qwen2_without_a_bias_is_an_error_that_names_it() {
    let found = renamed(include_bytes!("fixtures/qwen2.gguf"), "blk.0.attn_k.bias", "blk.0.attn_z.bias");
    assert!(found.contains("no tensor blk.0.attn_k.bias"), "{found}");
}

/// What loading the llama fixture says when it holds one more tensor, a single number. The name's length must keep the
/// tensor data aligned.
fn with_tensor(name: &str, dimensions: u32) -> String {
    let mut bytes = include_bytes!("fixtures/llama.gguf").to_vec();
    let file = Gguf::from_vec("llama", bytes.clone()).expect("a file");
    // Its data is at the end, where there is room for it.
    let data = |tensor| file.data(tensor).as_ptr() as usize;
    let start = file.tensors().values().map(data).min().expect("tensors");
    let end = file.tensors().values().map(|tensor| data(tensor) + file.data(tensor).len()).max();
    let offset = (end.expect("tensors") - start).next_multiple_of(32) as u64;
    bytes.extend([0; 64]);
    let count = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
    bytes[8..16].copy_from_slice(&(count + 1).to_le_bytes());
    let mut entry = (name.len() as u64).to_le_bytes().to_vec();
    entry.extend(name.as_bytes());
    entry.extend(dimensions.to_le_bytes());
    entry.extend((0..dimensions).flat_map(|_| 1u64.to_le_bytes()));
    entry.extend(0u32.to_le_bytes());
    entry.extend(offset.to_le_bytes());
    assert!(entry.len().is_multiple_of(32), "{name} moves the data by {}", entry.len());
    let first = |name: &String| bytes.windows(name.len()).position(|window| window == name.as_bytes());
    let first = file.tensors().keys().filter_map(first).min().expect("tensors") - 8;
    bytes.splice(first..first, entry);
    let file = Gguf::from_vec("more", bytes).expect("a file");
    Model::from_gguf(file).err().map_or("no error".into(), |error| error.to_string())
}

#[test]
fn the_tables_that_converters_stored_in_layers_are_harmless_and_nothing_else_is() {
    assert_eq!(with_tensor("blk.10.rope_freqs.weight", 2), "no error");
    assert_eq!(with_tensor("blk.0000000.attn_rot_embd.weight", 1), "no error");
    for name in ["blk.10.rope_freqs.weighs", "blk.1x.rope_freqs.weight", "blk_10.rope_freqs.weight"] {
        let found = with_tensor(name, 2);
        assert!(found.contains(&format!("tensor {name} is not used by this architecture")), "{found}");
    }
}
