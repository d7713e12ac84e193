//! Tokenizers against the vocabulary files of llama.cpp, where they are at hand.
//!
//! `KILN_VOCABULARIES` names the folder with `ggml-vocab-*.gguf` and their `.inp` and `.out` files (`models/` in a
//! llama.cpp source tree). They are not part of this repository; without the variable the test says so and passes.

use std::path::{Path, PathBuf};

use kiln_engine::gguf::Gguf;
use kiln_engine::tokenizer::Tokenizer;

#[test]
fn every_supported_vocabulary_gives_the_recorded_tokens() {
    let Some(folder) = std::env::var_os("KILN_VOCABULARIES").map(PathBuf::from) else {
        eprintln!("skipped: KILN_VOCABULARIES is not set");
        return;
    };
    for name in
        ["llama-spm", "llama-bpe", "qwen2", "gpt-2", "phi-3", "starcoder", "refact", "command-r", "mpt"]
    {
        let checked = check(&folder, name);
        eprintln!("{name}: {checked} texts");
    }
}

fn check(folder: &Path, name: &str) -> usize {
    let path = folder.join(format!("ggml-vocab-{name}.gguf"));
    let tokenizer = Gguf::open(&path).and_then(|file| Tokenizer::from_gguf(&file)).unwrap();
    let beside = |extension: &str| std::fs::read_to_string(path.with_extension(extension)).unwrap();
    let (inputs, outputs) = (beside("gguf.inp"), beside("gguf.out"));
    let texts = inputs.split("\n__ggml_vocab_test__\n");
    let mut checked = 0;
    for (text, line) in texts.zip(outputs.lines()) {
        let expected: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(tokenizer.encode(text, false, false), expected, "{name}: {text:?}");
        checked += 1;
    }
    assert!(checked > 40, "{name}: only {checked} texts");
    checked
}
