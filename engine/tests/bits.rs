//! The contract on the built-in model: the same bits for every level, any number of threads and any batches.

use kiln_engine::backend::cpu::{Cpu, Level, Options};
use kiln_engine::backend::{Backend, Wanted};
use kiln_engine::model::Model;

const TOKENS: usize = 70;

struct Run {
    logits: Vec<u32>,
    keys: Vec<u16>,
    values: Vec<u16>,
}

/// Logits of all positions and the cache, fed in pieces of the given sizes in turn.
fn run(level: Level, threads: usize, batch: usize, pieces: &[usize]) -> Run {
    let model = Model::from_gguf(kiln_engine::builtin().expect("the built-in file")).expect("a model");
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| (i * 397 + 11) % model.vocabulary() as u32).collect();
    let options = Options { level, batch, ..Options::new(96, threads) };
    let mut backend = Cpu::load(model, options).expect("it loads");
    let mut logits = Vec::new();
    let mut sizes = pieces.iter().cycle();
    let mut position = 0;
    while position < TOKENS {
        let end = TOKENS.min(position + sizes.next().expect("a cycle"));
        backend.run(&tokens[position..end], position, Wanted::All).expect("a step");
        logits.extend(backend.logits().iter().map(|logit| logit.to_bits()));
        position = end;
    }
    let (keys, values) = backend.cache();
    Run { logits, keys: keys.to_vec(), values: values.to_vec() }
}

#[test]
fn levels_threads_and_batches_do_not_change_a_bit() {
    let want = run(Level::fastest(), 1, 1, &[1]);
    let mut variants =
        vec![(1, 64, vec![64]), (2, 64, vec![7, 1, 30]), (3, 8, vec![8, 3]), (5, 16, vec![16])];
    variants.push((4, 1, vec![1]));
    for level in Level::detected() {
        // The portable level is slow without optimisation: one variant is enough, its kernels are tested alone.
        let count = if level == Level::PORTABLE { 1 } else { variants.len() };
        for (threads, batch, pieces) in &variants[..count] {
            let got = run(level, *threads, *batch, pieces);
            let name = format!("{level}, {threads} threads, pieces {pieces:?}");
            assert!(got.logits == want.logits, "logits differ: {name}");
            assert!(got.keys == want.keys && got.values == want.values, "the cache differs: {name}");
        }
    }
}

#[test]
fn a_cache_that_is_taken_back_gives_the_same_bits() {
    let model = || Model::from_gguf(kiln_engine::builtin().expect("the built-in file")).expect("a model");
    let mut fresh = Cpu::load(model(), Options::new(32, 1)).expect("it loads");
    fresh.run(&[0, 5, 9, 300], 0, Wanted::Last).expect("a step");
    let mut reused = Cpu::load(model(), Options::new(32, 1)).expect("it loads");
    reused.run(&[0, 5, 77, 78, 79, 80], 0, Wanted::Last).expect("a step");
    reused.run(&[9, 300], 2, Wanted::Last).expect("a step");
    assert_eq!(fresh.logits(), reused.logits());
}

#[test]
fn requests_that_cannot_be_served_are_errors() {
    let model = || Model::from_gguf(kiln_engine::builtin().expect("the built-in file")).expect("a model");
    let mut backend = Cpu::load(model(), Options { batch: 4, ..Options::new(8, 1) }).expect("it loads");
    let mut error = |tokens: &[u32], position, wanted| {
        backend.run(tokens, position, wanted).expect_err("it cannot be served").to_string()
    };
    assert_eq!(error(&[1024], 0, Wanted::Last), "token 1024 is not in the vocabulary of 1024");
    assert_eq!(error(&[1], 1, Wanted::Last), "position 1 does not follow the 0 in the cache");
    assert_eq!(error(&[1; 9], 0, Wanted::Last), "9 tokens at position 0 do not fit the context of 8");
    assert_eq!(error(&[1; 5], 0, Wanted::All), "logits of 5 tokens wanted, a batch holds 4");
    let small = Options { memory: Some(1 << 20), ..Options::new(8, 1) };
    let message = Cpu::load(model(), small).err().expect("it does not fit").to_string();
    assert!(message.starts_with("a context of 8 does not fit: weights "), "{message}");
    assert!(
        message.ends_with("MiB, and 1 MiB are available (the built-in model was trained for 512)"),
        "{message}"
    );
}
