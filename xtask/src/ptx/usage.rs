//! What entries need on a GPU, as `ptxas -v` tells it: registers, memory, spills.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::base::env::Env;
use crate::base::process::{self, Failure};
use crate::machine::cuda::Ptxas;
use crate::machine::probe;
use crate::report::error::{Error, Result};

crate::codes! {
    PTXAS_FAILED = "KILN-0351", Machine, "ptxas does not assemble the PTX",
        "ptxas was run on the PTX that was built, to read how many registers an entry needs and what it spills. It \
         failed: the PTX is wrong, or newer than this ptxas.";
    PTXAS_OUTPUT = "KILN-0352", Internal, "what ptxas says cannot be read",
        "`ptxas -v` prints for every entry a block with its stack, spills and registers. A block is missing, there \
         twice or in another form than kiln knows, so no number is taken from it.";
}

/// What one entry needs. Bytes are those of one thread, shared memory of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Registers of a thread.
    pub registers: u32,
    /// Statically declared shared memory, bytes.
    pub shared: u32,
    /// Stack frame, bytes.
    pub stack: u32,
    /// Bytes stored by spills.
    pub spill_stores: u32,
    /// Bytes loaded by spills.
    pub spill_loads: u32,
}

/// As long as ptxas may take for one file.
const LIMIT: Duration = Duration::from_secs(300);

/// Assembles the PTX file `path` for `target` and reads the usage of every one of `entries`.
///
/// # Errors
/// ptxas fails ([`PTXAS_FAILED`]), or does not tell each of them exactly once ([`PTXAS_OUTPUT`]).
pub fn assemble<'a>(
    ptxas: &Ptxas,
    path: &Path,
    target: &str,
    entries: impl IntoIterator<Item = &'a str>,
    env: &Env,
) -> Result<BTreeMap<String, Usage>> {
    let scratch = crate::base::interrupt::Folder::temporary("kiln-ptxas-")?;
    let mut command = probe::command(&ptxas.path, env);
    command.arg("-v").arg(format!("-arch={target}")).arg(path).arg("-o").arg(scratch.path().join("k.cubin"));
    let failed = |what: String| {
        Error::new(&PTXAS_FAILED, format!("{} {what} for {}", ptxas.path.display(), path.display()))
            .hint("use a ptxas that is at least as new as the PTX version, from CUDA_TOOLKIT_PATH")
    };
    let output = process::output(&mut command, LIMIT).map_err(|failure| match failure {
        Failure::Start(error) => failed(format!("cannot start: {error}")),
        Failure::TimedOut(limit) => failed(format!("took longer than {} s", limit.as_secs())),
    })?;
    if !output.status.success() {
        return Err(failed(format!("ended with {}", output.status)).cause(output.stderr.trim()));
    }
    let unreadable =
        |what: String| {
            Error::new(&PTXAS_OUTPUT, format!("{} ({}): {what}", ptxas.path.display(), ptxas.full))
                .hint(format!("run: {} -v -arch={target} {}", ptxas.path.display(), path.display()))
        };
    // Which stream it writes to is a matter of its version.
    let found = parse(&format!("{}\n{}", output.stdout, output.stderr)).map_err(unreadable)?;
    for name in entries {
        if !found.contains_key(name) {
            return Err(unreadable(format!("it says nothing about the entry {name}")));
        }
    }
    Ok(found)
}

/// Reads the blocks of all entries.
fn parse(text: &str) -> Result<BTreeMap<String, Usage>, String> {
    let mut found: BTreeMap<String, Usage> = BTreeMap::new();
    // The entry that is being compiled, and whether the last properties are its own, not those of a function it calls.
    let mut current: Option<(String, Partial)> = None;
    for line in text.lines() {
        let said = line.trim();
        let said =
            said.strip_prefix("ptxas info").map_or(said, |rest| rest.trim_start().trim_start_matches(':'));
        let said = said.trim();
        if let Some(rest) = said.strip_prefix("Compiling entry function '") {
            finish(&mut current, &mut found)?;
            let name = rest.split('\'').next().unwrap_or_default();
            current = Some((name.to_owned(), Partial::default()));
        } else if let Some(name) = said.strip_prefix("Function properties for ") {
            if let Some((entry, partial)) = &mut current {
                partial.own = name.trim() == entry;
            }
        } else if said.contains("bytes stack frame") {
            if let Some((_, partial)) = &mut current
                && partial.own
            {
                let [stack, stores, loads] =
                    numbers(said, ["bytes stack frame", "bytes spill stores", "bytes spill loads"])
                        .ok_or_else(|| format!("cannot read {said:?}"))?;
                partial.memory = Some((stack, stores, loads));
            }
        } else if let Some(rest) = said.strip_prefix("Used ")
            && let Some((_, partial)) = &mut current
        {
            let [registers] = numbers(rest, ["registers"]).ok_or_else(|| format!("cannot read {said:?}"))?;
            let shared = numbers(rest, ["bytes smem"]).map_or(0, |[shared]| shared);
            partial.used = Some((registers, shared));
        }
    }
    finish(&mut current, &mut found)?;
    Ok(found)
}

#[derive(Default)]
struct Partial {
    own: bool,
    memory: Option<(u32, u32, u32)>,
    used: Option<(u32, u32)>,
}

fn finish(
    current: &mut Option<(String, Partial)>,
    found: &mut BTreeMap<String, Usage>,
) -> Result<(), String> {
    let Some((name, partial)) = current.take() else { return Ok(()) };
    let (Some((stack, spill_stores, spill_loads)), Some((registers, shared))) =
        (partial.memory, partial.used)
    else {
        return Err(format!("the block of the entry {name} is not complete"));
    };
    let usage = Usage { registers, shared, stack, spill_stores, spill_loads };
    match found.insert(name.clone(), usage) {
        None => Ok(()),
        Some(_) => Err(format!("the entry {name} is there twice")),
    }
}

/// The number before each of `units` in a list with commas, all of which must be there.
fn numbers<const N: usize>(text: &str, units: [&str; N]) -> Option<[u32; N]> {
    let mut values = [0; N];
    for (value, unit) in values.iter_mut().zip(units) {
        let number = text.split(',').find_map(|part| part.trim().strip_suffix(unit))?;
        *value = number.trim().parse().ok()?;
    }
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What ptxas V13.0.88 printed.
    const REAL: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k2' for 'sm_90'
ptxas info    : Function properties for k2
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
ptxas info    : Compile time = 15.301 ms
ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for k
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 8 registers, used 1 barriers, 16 bytes cumulative stack size, 64 bytes smem, 372 bytes cmem[0]
ptxas info    : Compile time = 1.311 ms
";

    #[test]
    fn the_output_of_the_real_ptxas_is_read() {
        let found = parse(REAL).unwrap();
        assert_eq!(found["k2"], Usage { registers: 4, ..Usage::default() });
        let k = Usage { registers: 8, shared: 64, stack: 16, spill_stores: 24, spill_loads: 32 };
        assert_eq!(found["k"], k);
    }

    #[test]
    fn properties_of_a_called_function_are_not_the_entry_s() {
        let called = "ptxas info    : Function properties for helper\n    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n";
        let text = REAL.replace("ptxas info    : Used 8", &format!("{called}ptxas info    : Used 8"));
        assert_eq!(parse(&text).unwrap(), parse(REAL).unwrap());
    }

    #[test]
    fn anything_unexpected_is_an_error() {
        for (from, to, expected) in [
            ("16 bytes stack frame, ", "", "the block of the entry k is not complete"),
            ("Used 4 registers, used 0 barriers\n", "\n", "the block of the entry k2 is not complete"),
            ("function 'k2'", "function 'k'", "the block of the entry k is not complete"),
            ("Used 8 registers", "Used many registers", "cannot read \"Used many registers, "),
            ("32 bytes spill loads", "32 bytes", "cannot read \"16 bytes stack frame, "),
        ] {
            assert!(REAL.contains(from), "{from}");
            let found = parse(&REAL.replace(from, to)).unwrap_err();
            assert!(found.starts_with(expected), "{found}");
        }
        let twice = format!("{REAL}{REAL}");
        assert_eq!(parse(&twice).unwrap_err(), "the entry k2 is there twice");
        assert!(parse("").unwrap().is_empty());
    }
}
