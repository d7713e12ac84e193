//! What any bytes that claim to be a model go through: the target of the property test and of `examples/fuzz.rs`.

use crate::backend::cpu::{Cpu, Level, MemoryNeed, Options};
use crate::backend::{Backend, Wanted};
use crate::chat::{Message, Template};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::Model;
use crate::rng::SplitMix64;
use crate::tokenizer::Tokenizer;

/// Models that would take more than this are not loaded.
const MEMORY: u64 = 64 << 20;

/// Reads `bytes` as a model and runs it a little. Any result is fine; a panic or a hang is not.
///
/// # Errors
/// The first thing that the bytes are not.
pub fn consume(bytes: Vec<u8>) -> Result<()> {
    let file = Gguf::from_vec("the file", bytes)?;
    let tokenizer = Tokenizer::from_gguf(&file);
    if let Ok(tokenizer) = &tokenizer {
        let tokens = tokenizer.encode("Hi <s> \u{e9}\n42 \u{1f999}", true, true);
        for token in tokens {
            let _ = (tokenizer.bytes(token), tokenizer.text(token), tokenizer.is_end(token));
        }
        if let Ok(template) = Template::from_gguf(&file, tokenizer) {
            let _ = template.render(&[Message { role: "user", content: "Hi".into() }], true);
        }
    }
    let model = Model::from_gguf(file)?;
    let options = Options { batch: 4, level: Level::fastest(), memory: Some(MEMORY), ..Options::new(8, 1) };
    let _ = MemoryNeed::of(&model, &options).total();
    let mut backend = Cpu::load(model, options)?;
    let last = backend.vocabulary() as u32 - 1;
    backend.run(&[0, last, last / 2], 0, Wanted::All)?;
    backend.run(&[1.min(last)], 3, Wanted::Last)
}

/// Damages a file: flips, sets, copies and removes bytes, most often in its first `header` bytes.
pub fn damage(bytes: &mut Vec<u8>, header: usize, rng: &mut SplitMix64) {
    for _ in 0..=rng.below(4) {
        let range = if rng.below(8) > 0 { header.min(bytes.len()) } else { bytes.len() };
        if range == 0 {
            return;
        }
        let at = rng.below(range as u32) as usize;
        match rng.below(6) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes[at] = rng.bits() as u8,
            2 => {
                // A length, count or offset that is far too large, or just off.
                let value = [u64::MAX, 1 << 63, 1 << 32, rng.bits(), 0, 1][rng.below(6) as usize];
                for (byte, new) in bytes[at..].iter_mut().zip(value.to_le_bytes()) {
                    *byte = new;
                }
            }
            3 => {
                let from = rng.below(range as u32) as usize;
                let len = (rng.below(64) as usize).min(bytes.len() - at.max(from));
                bytes.copy_within(from..from + len, at);
            }
            4 => bytes.truncate(at),
            _ => {
                let end = (at + rng.below(16) as usize).min(bytes.len());
                bytes.drain(at..end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::{Error, Place};

    const LLAMA: &[u8] = include_bytes!("../tests/fixtures/llama.gguf");
    const GEMMA: &[u8] = include_bytes!("../tests/fixtures/gemma3.gguf");
    /// Where the tensors' data begins, about.
    const HEADER: usize = 12_000;

    proptest! {
        #[test]
        fn damaged_files_are_errors_or_models_and_never_panics(seed in any::<u64>()) {
            let mut rng = SplitMix64::new(seed);
            let mut bytes = if rng.below(2) == 0 { LLAMA } else { GEMMA }.to_vec();
            damage(&mut bytes, HEADER, &mut rng);
            let _ = consume(bytes);
        }

        #[test]
        fn every_truncation_is_an_error(len in 0..LLAMA.len()) {
            prop_assert!(consume(LLAMA[..len].to_vec()).is_err());
        }
    }

    #[test]
    fn whole_files_run() {
        consume(LLAMA.to_vec()).expect("a good file");
        consume(GEMMA.to_vec()).expect("a good file");
    }

    #[test]
    fn a_nan_in_a_weight_is_named_by_its_layer() {
        let file = Gguf::from_vec("llama", LLAMA.to_vec()).expect("a good file");
        let place_of = |name: &str| {
            let data = file.data(&file.tensors()[name]);
            // The bytes are random: the first 32 of a tensor are found once.
            let at = LLAMA.windows(32).position(|window| window == &data[..32]).expect("inside the file");
            let mut bytes = LLAMA.to_vec();
            bytes[at..at + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
            match consume(bytes) {
                Err(Error::NotFinite { place, position: 0 }) => place,
                other => panic!("{name}: {other:?}"),
            }
        };
        assert_eq!(place_of("blk.1.ffn_down.weight"), Place::FeedForward(1));
        assert_eq!(place_of("blk.2.attn_output.weight"), Place::Attention(2));
        assert_eq!(place_of("output.weight"), Place::Logits);
        assert_eq!(place_of("token_embd.weight"), Place::Embedding);
        let message = Error::NotFinite { place: Place::FeedForward(1), position: 7 }.to_string();
        assert_eq!(
            message,
            "not a number in layer 1, feed-forward at position 7: the weights or the arithmetic before it are broken"
        );
    }

    #[test]
    fn contradictions_are_named_with_file_place_and_offset() {
        let error = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = LLAMA.to_vec();
            change(&mut bytes);
            consume(bytes).expect_err("a damaged file").to_string()
        };
        let set = |at: usize, value: &'static [u8]| {
            move |bytes: &mut Vec<u8>| bytes[at..at + value.len()].copy_from_slice(value)
        };
        assert_eq!(
            error(&set(0, b"GGML")),
            "the file: the magic, byte 0: found [47, 47, 4d, 4c], expected \"GGUF\""
        );
        assert_eq!(error(&set(4, &[9])), "the file: the version, byte 4: found 9, expected 2 or 3");
        assert_eq!(
            error(&set(8, &[0xff; 8])),
            format!(
                "the file: the tensor count, byte 16: 18446744073709551615 entries do not fit in the {} bytes that are left",
                LLAMA.len() - 24
            )
        );
        let at = LLAMA.windows(20).position(|w| w == b"blk.0.ffn_gate.weigh").expect("a name");
        let twice = error(&|bytes| {
            let from = LLAMA.windows(18).position(|w| w == b"blk.0.ffn_up.weigh").expect("a name");
            bytes[from - 8..from + 19].copy_within(0..27, 0);
            bytes[at + 6..at + 14].copy_from_slice(b"ffn_down");
        });
        assert!(twice.starts_with("the file: "), "{twice}");
    }
}
