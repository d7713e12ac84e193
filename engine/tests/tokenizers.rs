//! Vocabularies that are made here: end tokens by name, files without a splitting rule, and what is refused.

use std::path::PathBuf;

use kiln_engine::gguf::Gguf;
use kiln_engine::tokenizer::Tokenizer;

enum Value<'a> {
    Text(&'a str),
    Number(u32),
    Texts(&'a [&'a str]),
    Numbers(&'a [i32]),
}

/// A GGUF file with these keys and no tensors.
fn file(keys: &[(&str, Value)]) -> (tempfile::TempDir, PathBuf) {
    let mut bytes = b"GGUF".to_vec();
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        text(&mut bytes, key);
        match value {
            Value::Number(number) => bytes.extend([4u32, *number].iter().flat_map(|n| n.to_le_bytes())),
            Value::Text(value) => {
                bytes.extend(8u32.to_le_bytes());
                text(&mut bytes, value);
            }
            Value::Texts(values) => {
                bytes.extend([9u32, 8].iter().flat_map(|n| n.to_le_bytes()));
                bytes.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| text(&mut bytes, value));
            }
            Value::Numbers(values) => {
                bytes.extend([9u32, 5].iter().flat_map(|n| n.to_le_bytes()));
                bytes.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
            }
        }
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vocabulary.gguf");
    std::fs::write(&path, bytes).expect("written");
    (folder, path)
}

fn read(keys: &[(&str, Value)]) -> Result<Tokenizer, String> {
    let (_folder, path) = file(keys);
    Gguf::open(&path).and_then(|file| Tokenizer::from_gguf(&file)).map_err(|error| error.to_string())
}

const PRE: &str = "tokenizer.ggml.pre";

fn bpe(pre: Option<&str>, tokens: &[&str], kinds: &[i32], merges: &[&str]) -> Result<Tokenizer, String> {
    let mut keys = vec![
        ("tokenizer.ggml.model", Value::Text("gpt2")),
        ("tokenizer.ggml.tokens", Value::Texts(tokens)),
        ("tokenizer.ggml.token_type", Value::Numbers(kinds)),
        ("tokenizer.ggml.merges", Value::Texts(merges)),
        ("tokenizer.ggml.eos_token_id", Value::Number(0)),
    ];
    keys.extend(pre.map(|pre| (PRE, Value::Text(pre))));
    read(&keys)
}

fn ends(tokenizer: &Tokenizer) -> Vec<u32> {
    (0..tokenizer.len() as u32).filter(|token| tokenizer.is_end(*token)).collect()
}

#[test]
fn end_tokens_count_by_name_whatever_their_type() {
    let names = ["a", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>", "<|other|>"];
    for kind in [1, 3, 4] {
        let tokenizer = bpe(Some("gpt-2"), &names, &[1, kind, kind, kind, kind, kind, 3], &[]).expect("good");
        assert_eq!(ends(&tokenizer), [0, 1, 2, 3, 4, 5], "type {kind}");
        // They structure a conversation then: no text, and not made from what is typed.
        assert!(tokenizer.bytes(1).is_empty());
        assert_eq!(tokenizer.encode("<|im_end|>", false, true), [1]);
        assert_ne!(tokenizer.encode("<|im_end|>", false, false), [1]);
    }
}

#[test]
fn ends_that_are_no_ends_beside_others_go_on() {
    let tokenizer =
        bpe(Some("gpt-2"), &["<|return|>", "<|call|>", "<|end|>"], &[3, 3, 3], &[]).expect("good");
    assert_eq!(ends(&tokenizer), [0, 1]);
    let tokenizer =
        bpe(Some("gpt-2"), &["<turn|>", "<|tool_response>", "</s>"], &[3, 3, 3], &[]).expect("good");
    assert_eq!(ends(&tokenizer), [0, 1]);
}

#[test]
fn a_file_without_a_splitting_rule_gets_the_default_one_with_a_warning() {
    let tokens = ["x", "1", "2", "12", "123", "3", "4"];
    let merges = ["1 2", "12 3"];
    let tokenizer = bpe(None, &tokens, &[1; 7], &merges).expect("good");
    assert!(tokenizer.warnings().iter().any(|text| text.contains("tokenizer.ggml.pre")));
    assert_eq!(tokenizer.encode("x1234", false, false), [0, 4, 6]);
    let named = bpe(Some("default"), &tokens, &[1; 7], &merges).expect("good");
    assert!(named.warnings().is_empty());
}

#[test]
fn only_some_rules_take_whole_words() {
    // Without merges only a lookup of the whole word finds `ab`.
    let encode =
        |pre| bpe(Some(pre), &["a", "b", "ab"], &[1; 3], &[]).expect("good").encode("ab", false, false);
    for pre in ["llama-bpe", "tekken", "glm4", "lfm2", "youtu", "minicpm5"] {
        assert_eq!(encode(pre), [2], "{pre}");
    }
    for pre in ["dbrx", "smaug-bpe", "chatglm-bpe", "gpt-4o", "qwen2"] {
        assert_eq!(encode(pre), [0, 1], "{pre}");
    }
}

#[test]
fn characters_and_bytes_of_gemma_4() {
    let tokens = ["<0x0A>", "<0xC3>", "<0xA9>", "a", "▁", "▁a", "\n\n", "<bos>"];
    let tokenizer = read(&[
        ("tokenizer.ggml.model", Value::Text("gemma4")),
        ("tokenizer.ggml.tokens", Value::Texts(&tokens)),
        ("tokenizer.ggml.token_type", Value::Numbers(&[6, 6, 6, 1, 1, 1, 1, 3])),
        ("tokenizer.ggml.merges", Value::Texts(&["▁ a"])),
        ("tokenizer.ggml.bos_token_id", Value::Number(7)),
    ])
    .expect("good");
    assert_eq!(tokenizer.encode(" a a\n\né\n", true, false), [7, 5, 5, 6, 1, 2, 0]);
    let text: Vec<u8> = [5, 6, 1, 2].iter().flat_map(|token| tokenizer.bytes(*token).to_vec()).collect();
    assert_eq!(text, " a\n\né".as_bytes());
}

#[test]
fn vocabularies_that_cannot_be_served_are_refused_by_name() {
    let named = |model: &str, architecture: &str| {
        read(&[
            ("general.architecture", Value::Text(architecture)),
            ("tokenizer.ggml.model", Value::Text(model)),
            ("tokenizer.ggml.tokens", Value::Texts(&["a"])),
        ])
        .err()
        .unwrap_or_default()
    };
    assert!(named("bert", "bert").contains("bert is an encoder-only model"), "{}", named("bert", "bert"));
    assert!(named("t5", "nomic-bert-moe").contains("nomic-bert-moe is an encoder-only model"));
    for model in ["rwkv", "plamo2", "bert", "hybriddna"] {
        assert!(named(model, "llama").contains(&format!("model {model:?} is not supported")), "{model}");
    }
    let error = bpe(Some("frob"), &["a"], &[1], &[]).err().unwrap_or_default();
    assert!(error.contains("pre-tokenizer \"frob\" is not supported; these are: a.x-4.0, afmoe"), "{error}");
}
