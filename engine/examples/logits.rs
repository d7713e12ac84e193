//! Writes the logits of a text as little-endian f32: `logits MODEL TOKENS OUT [CONTEXT]`, where TOKENS holds numbers.
//!
//! The other half of `engine/accuracy/compare.py`.

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};

use kiln_engine::backend::cpu::{Cpu, Options};
use kiln_engine::backend::{Backend, Wanted};
use kiln_engine::gguf::Gguf;
use kiln_engine::model::Model;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, tokens, out] = &arguments[..] else {
        return Err("usage: logits MODEL TOKENS OUT".into());
    };
    let tokens: Vec<u32> =
        std::fs::read_to_string(tokens)?.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let threads = std::thread::available_parallelism()?.get();
    let model = Model::from_gguf(Gguf::open(model.as_ref())?)?;
    let mut backend = Cpu::load(model, Options::new(tokens.len(), threads))?;
    let mut out = BufWriter::new(File::create(out)?);
    let batch = backend.batch_size();
    for (index, tokens) in tokens.chunks(batch).enumerate() {
        backend.run(tokens, index * batch, Wanted::All)?;
        for logit in backend.logits() {
            out.write_all(&logit.to_le_bytes())?;
        }
    }
    out.flush()?;
    Ok(())
}
