//! Sequences that share steps: each has the bits, of logits and cache, that it has alone.

use kiln_engine::backend::cpu::{Cpu, Level, Options};
use kiln_engine::backend::{Backend, Column, Output, Selection, SequenceId, Wanted};
use kiln_engine::gguf::Gguf;
use kiln_engine::model::Model;
use proptest::prelude::*;

const CONTEXT: usize = 14;

fn model(number: usize) -> Model {
    let bytes: [&[u8]; 4] = [
        include_bytes!("fixtures/llama.gguf"),
        include_bytes!("fixtures/qwen2.gguf"),
        include_bytes!("fixtures/qwen3.gguf"),
        include_bytes!("fixtures/gemma3.gguf"),
    ];
    let file = Gguf::from_vec("fixture", bytes[number].to_vec()).expect("a file");
    Model::from_gguf(file).expect("a model")
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Logits of each position, and the cache, of a sequence that is run alone, token by token.
fn alone(model: Model, tokens: &[u32]) -> (Vec<Vec<u32>>, Vec<u16>, Vec<u16>) {
    let mut cpu = Cpu::load(model, Options::new(CONTEXT, 1)).expect("it loads");
    let mut logits = Vec::new();
    for (position, token) in tokens.iter().enumerate() {
        cpu.run(&[*token], position, Wanted::Last).expect("a step");
        logits.push(bits(cpu.logits()));
    }
    let (keys, values) = cpu.cache();
    (logits, keys.to_vec(), values.to_vec())
}

type Schedule = Vec<(usize, usize, bool)>;

fn schedules() -> impl Strategy<Value = (Vec<Vec<u32>>, Schedule)> {
    let sequences = prop::collection::vec(prop::collection::vec(any::<u32>(), 1..CONTEXT), 1..5);
    // The sequence that goes on, how many columns later a step ends, and whether logits are wanted.
    let turns = prop::collection::vec((0usize..5, 1usize..9, any::<bool>()), 64);
    (sequences, turns)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn interleaved_sequences_have_the_bits_of_running_alone(
        (sequences, turns) in schedules(),
        number in 0usize..4,
        threads in 1usize..4,
        batch in 1usize..9,
        level in prop::sample::select(Level::detected()),
    ) {
        let model = model(number);
        let vocabulary = model.vocabulary();
        let sequences: Vec<Vec<u32>> = sequences
            .into_iter()
            .map(|tokens| tokens.into_iter().map(|token| token % vocabulary as u32).collect())
            .collect();
        let want: Vec<_> = sequences.iter().map(|tokens| alone(model.clone(), tokens)).collect();
        let options =
            Options { level, batch, sequences: sequences.len(), ..Options::new(CONTEXT, threads) };
        let mut cpu = Cpu::load(model, options).expect("it loads");
        let mut done = vec![0; sequences.len()];
        let mut turns = turns.into_iter().cycle();
        while done.iter().zip(&sequences).any(|(done, tokens)| *done < tokens.len()) {
            let mut columns = Vec::new();
            let mut outputs = 0;
            let (_, size, _) = turns.next().expect("a cycle");
            while columns.len() < size && done.iter().zip(&sequences).any(|(done, tokens)| *done < tokens.len()) {
                let (turn, _, output) = turns.next().expect("a cycle");
                // The next sequence, from the drawn one on, that has tokens left.
                let of = |offset| (turn + offset) % sequences.len();
                let sequence =
                    (0..sequences.len()).map(of).find(|s| done[*s] < sequences[*s].len()).expect("one");
                let output = output && outputs < batch;
                outputs += usize::from(output);
                columns.push(Column {
                    token: sequences[sequence][done[sequence]],
                    sequence: SequenceId(sequence as u32),
                    position: done[sequence],
                    output,
                });
                done[sequence] += 1;
            }
            let Output::Logits(logits) = cpu.step(&columns, Selection::Logits).expect("a step") else {
                panic!("logits were selected")
            };
            prop_assert_eq!(logits.len(), outputs * vocabulary);
            let wanted = columns.iter().filter(|column| column.output);
            for (logits, column) in logits.chunks_exact(vocabulary).zip(wanted) {
                prop_assert!(bits(logits) == want[column.sequence.0 as usize].0[column.position], "{:?}", column);
            }
        }
        for (number, (_, keys, values)) in want.iter().enumerate() {
            let (got_keys, got_values) = cpu.cache_of(SequenceId(number as u32));
            prop_assert!(got_keys == keys && got_values == values, "the cache of {}", number);
        }
    }
}

#[test]
fn selections_agree_and_a_sequence_begins_anew() {
    let options = Options { sequences: 2, ..Options::new(CONTEXT, 2) };
    let mut cpu = Cpu::load(model(0), options).expect("it loads");
    let columns = [(0, 3, 0), (1, 5, 0), (0, 4, 1)].map(|(sequence, token, position)| Column {
        token,
        sequence: SequenceId(sequence),
        position,
        output: position == 1 || sequence == 1,
    });
    let mut selected = |selection| match cpu.step(&columns, selection).expect("a step") {
        Output::Logits(logits) => {
            let columns = logits.chunks_exact(logits.len() / 2);
            columns.map(kiln_engine::sample::best).collect::<Vec<u32>>()
        }
        Output::Greedy(tokens) => tokens.to_vec(),
        Output::TopK(candidates) => candidates.chunks_exact(3).map(|top| top[0].token).collect(),
    };
    let want = selected(Selection::Logits);
    assert_eq!(want.len(), 2);
    assert_eq!(selected(Selection::Greedy), want);
    assert_eq!(selected(Selection::TopK(3)), want);
    let mut refused = |column: Column, selection| {
        cpu.step(&[column], selection).expect_err("it cannot be served").to_string()
    };
    let column = Column { token: 1, sequence: SequenceId(2), position: 0, output: true };
    assert_eq!(refused(column, Selection::Greedy), "sequence 2, and there are 2");
    let column = Column { sequence: SequenceId(1), position: 2, ..column };
    assert_eq!(refused(column, Selection::Greedy), "position 2 does not follow the 1 in the cache");
    let column = Column { position: 1, ..column };
    assert_eq!(refused(column, Selection::TopK(0)), "the largest 0 logits are none");
}
