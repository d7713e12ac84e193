//! Tokenizers against the vocabulary files of llama.cpp, where they are at hand.
//!
//! `KILN_VOCABULARIES` names the folder with `ggml-vocab-*.gguf` and their `.inp` and `.out` files (`models/` in a
//! llama.cpp source tree). They are not part of this repository; without the variable the test says so and passes.

use std::path::{Path, PathBuf};

use kiln_engine::gguf::Gguf;
use kiln_engine::tokenizer::Tokenizer;

#[test]
fn every_vocabulary_gives_the_recorded_tokens_or_is_refused_by_name() {
    let Some(folder) = std::env::var_os("KILN_VOCABULARIES").map(PathBuf::from) else {
        eprintln!("skipped: KILN_VOCABULARIES is not set");
        return;
    };
    let mut served = 0;
    let mut rows = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        let Some(name) = file.strip_prefix("ggml-vocab-").and_then(|rest| rest.strip_suffix(".gguf")) else {
            continue;
        };
        let result = match Gguf::open(&path).and_then(|file| Tokenizer::from_gguf(&file)) {
            Ok(tokenizer) => {
                served += 1;
                let warning = if tokenizer.warnings().is_empty() { "" } else { ", with a warning" };
                format!("{}{warning}", check(&path, name, &tokenizer))
            }
            Err(error) => {
                assert!(["bert-bge", "nomic-bert-moe"].contains(&name), "{name}: {error}");
                let reason = error.to_string();
                let reason = reason.rsplit(": ").next().unwrap_or_default().to_string();
                assert!(reason.contains("bert"), "{name}: {reason}");
                format!("refused: {reason}")
            }
        };
        rows.push(format!("| {name} | {result} |"));
    }
    rows.sort();
    println!("| vocabulary | texts |\n|---|---|\n{}", rows.join("\n"));
    assert!(served > 15, "only {served} vocabularies in {}", folder.display());
}

/// Encodes the texts beside the file and compares them with the recorded tokens; the number of texts, in words.
fn check(path: &Path, name: &str, tokenizer: &Tokenizer) -> String {
    let beside = |extension: &str| std::fs::read_to_string(path.with_extension(extension));
    let (Ok(inputs), Ok(outputs)) = (beside("gguf.inp"), beside("gguf.out")) else {
        assert!(!tokenizer.encode("Hello", false, false).is_empty(), "{name}");
        return "loads; no texts are recorded".into();
    };
    let texts = inputs.split("\n__ggml_vocab_test__\n");
    let mut checked = 0;
    for (text, line) in texts.zip(outputs.lines()) {
        let expected: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(tokenizer.encode(text, false, false), expected, "{name}: {text:?}");
        checked += 1;
    }
    assert!(checked > 40, "{name}: only {checked} texts");
    format!("{checked} equal")
}
