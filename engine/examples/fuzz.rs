//! Damages model files for some seconds and runs what is left: `fuzz SECONDS [SEED] FILE...`.
//!
//! A panic ends it with the seed of the case; the same seed makes the same case again. Not guided by coverage.

use std::error::Error;
use std::time::{Duration, Instant};

use kiln_engine::fuzz::{consume, damage};
use kiln_engine::rng::SplitMix64;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [seconds, seed, files @ ..] = &arguments[..] else {
        return Err("usage: fuzz SECONDS SEED FILE...".into());
    };
    let files: Vec<Vec<u8>> = files.iter().map(std::fs::read).collect::<Result<_, _>>()?;
    let limit = Duration::from_secs(seconds.parse()?);
    let (mut seed, started) = (seed.parse::<u64>()?, Instant::now());
    let (mut cases, mut good) = (0u64, 0u64);
    let mut slowest = Duration::ZERO;
    while started.elapsed() < limit {
        let mut rng = SplitMix64::new(seed);
        let mut bytes = files[rng.below(files.len() as u32) as usize].clone();
        let header = bytes.len() / 4;
        damage(&mut bytes, header, &mut rng);
        let case = Instant::now();
        let result = std::panic::catch_unwind(|| consume(bytes));
        slowest = slowest.max(case.elapsed());
        match result {
            Ok(result) => good += u64::from(result.is_ok()),
            Err(_) => return Err(format!("seed {seed} panics").into()),
        }
        cases += 1;
        seed = seed.wrapping_add(1);
    }
    println!("{cases} cases, {good} still ran, slowest {slowest:?}, next seed {seed}");
    Ok(())
}
