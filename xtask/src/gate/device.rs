//! Gates of the kernels on a card: the built binary compares its own bits.
//!
//! The checks are in the binary, so that a machine with a card and without Rust can run them; here is what starts it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::tail;
use super::{Defect, Gate, Need, Outcome, World};
use crate::base::process::{self, Failure};
use crate::build::gpu::{self, GpuBuild};
use crate::machine::arch::Arch;
use crate::report::error::Result;
use crate::report::progress::{self, Silent};
use crate::source::model;

const CARD: &[Need] = &[Need::Card];

/// The time that one check may take.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(1800);

/// A check of the binary: the gate's name, what it shows, the arguments, and those that seed its defect.
struct Binary {
    name: &'static str,
    about: &'static str,
    arguments: &'static [&'static str],
    defect: &'static str,
    defect_arguments: &'static [&'static str],
    /// Runs with the pinned model of this name, too, where the store has it.
    model: Option<&'static str>,
}

static BINARY: &[Binary] = &[
    Binary {
        name: "device/selftest",
        about: "every kernel gives the same bits on the card, on the CPU and in the reference",
        arguments: &["selftest", "--device", "cuda"],
        defect: "a runner with a wrong order of additions",
        defect_arguments: &["--plant", "lane-order"],
        model: None,
    },
    Binary {
        name: "device/kquant",
        about: "row products of every type, in all their forms, have the bits of the reference dot product",
        arguments: &["gate", "kquant"],
        defect: "a bit of a scale changed on the card",
        defect_arguments: &["--plant", "scale-bit"],
        model: None,
    },
    Binary {
        name: "device/kquant-fused",
        about: "rows with their norm, quantising or activation in one launch have the bits of the reference dot product",
        arguments: &["gate", "kquant-fused"],
        defect: "a bit of a norm's weight changed on the card",
        defect_arguments: &["--plant", "norm-bit"],
        model: None,
    },
    Binary {
        name: "device/kquant-selected",
        about: "rows and tiles of selected experts have the bits of the reference dot product",
        arguments: &["gate", "kquant-selected"],
        defect: "two selected experts exchanged",
        defect_arguments: &["--plant", "slot-order"],
        model: None,
    },
    Binary {
        name: "device/cpu-bits",
        about: "norms, activations, embeddings, heads and attention have the bits of the CPU",
        arguments: &["gate", "cpu-bits"],
        defect: "an epsilon that is off by one unit in the last place",
        defect_arguments: &["--plant", "epsilon-ulp"],
        model: None,
    },
    Binary {
        name: "device/contracts",
        about: "no launch contract states less than its entry reaches, and a shorter buffer is refused",
        arguments: &["gate", "contracts"],
        defect: "an allocation that is longer than stated",
        defect_arguments: &["--plant", "long-buffer"],
        model: None,
    },
    Binary {
        name: "device/graph",
        about: "replayed steps have the bits of launched ones",
        arguments: &["gate", "graph"],
        defect: "a replay with the state of the step before",
        defect_arguments: &["--plant", "stale-state"],
        model: None,
    },
    Binary {
        name: "device/batch",
        about: "batches have the bits of one token at a time",
        arguments: &["gate", "batch"],
        defect: "a bit of the cache of keys and values changed",
        defect_arguments: &["--plant", "cache-bit"],
        model: None,
    },
    Binary {
        name: "device/e2e",
        about: "logits and cache of whole models have the bits of the CPU backend",
        arguments: &["gate", "e2e"],
        defect: "a bit of a weight changed on the card",
        defect_arguments: &["--plant", "weight-bit"],
        model: Some("smollm2"),
    },
];

/// All of them.
pub fn gates() -> Vec<Gate> {
    BINARY
        .iter()
        .map(|binary| {
            Gate::new(binary.name, binary.about, CARD, binary.defect, move |world, defect| {
                run(world, binary, defect)
            })
        })
        .collect()
}

fn run(world: &World<'_>, binary: &Binary, defect: Defect) -> Result<Outcome> {
    let mut arguments: Vec<String> = binary.arguments.iter().map(|text| (*text).to_owned()).collect();
    if defect == Defect::Seeded {
        arguments.extend(binary.defect_arguments.iter().map(|text| (*text).to_owned()));
    }
    let model = binary.model.and_then(|name| fetched(world, name));
    if let Some(path) = &model {
        arguments.extend(["-m".to_owned(), path.display().to_string()]);
    }
    let skip = |reason: String, arch: Option<Arch>| {
        let path = arch.map_or_else(
            || "target/device/sm_NN/release/kiln".into(),
            |arch| gpu::binary(Path::new(""), &arch, world.request.asks_for_libnvvm()).display().to_string(),
        );
        Outcome::Skipped { reason, run: format!("{path} {}", arguments.join(" ")) }
    };
    let gpus = world.plan().gpu.value.clone().unwrap_or_default();
    let Some(card) = gpus.gpus.first() else {
        let reason = "no card here; on a machine that has one, after `cargo xtask build --arch` or with its binary \
                      copied there";
        return Ok(skip(reason.to_owned(), world.archs.last().copied()));
    };
    let named = world.archs.iter().copied().find(|arch| arch.runs_on(card.capability).is_ok());
    let arch = if world.archs_named { named } else { card.capability.arch().or(named) };
    let Some(arch) = arch else {
        let reason = format!("{card} runs none of the architectures that were named");
        return Ok(skip(reason, card.capability.arch()));
    };
    let path = match binary_for(world, arch)? {
        Ok(path) => path,
        Err(reason) => return Ok(skip(reason, Some(arch))),
    };
    let mut command = Command::new(&path);
    command.args(&arguments).stdin(Stdio::null());
    let shown = format!("{} {}", path.display(), arguments.join(" "));
    Ok(match process::output(&mut command, LIMIT) {
        Ok(output) if output.status.success() => match verdict(binary, &output.stdout) {
            Verdict::Green(found) => {
                let alone = match (binary.model, &model) {
                    (Some(name), None) => {
                        format!("; the built-in model alone, `cargo xtask model {name}` adds another")
                    }
                    _ => String::new(),
                };
                Outcome::green(format!("{card}: {found}{alone}"))
            }
            Verdict::Skipped(reason) => skip(format!("{card}, but the binary {reason}"), Some(arch)),
            Verdict::Unknown => Outcome::red(format!(
                "`{shown}` succeeds without saying that it checked anything\n{}",
                tail(&output.stdout)
            )),
        },
        Ok(output) => Outcome::red(format!(
            "`{shown}` ended with {}\n{}{}",
            output.status,
            tail(&output.stdout),
            tail(&output.stderr)
        )),
        Err(Failure::Start(error)) => Outcome::red(format!("`{shown}` cannot be started: {error}")),
        Err(Failure::TimedOut(limit)) => {
            Outcome::red(format!("`{shown}` took longer than {} s", limit.as_secs()))
        }
    })
}

/// What a binary that succeeded says of its check.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// It was made; what was found.
    Green(String),
    /// It was not made; why.
    Skipped(String),
    /// It is not said.
    Unknown,
}

/// Reads the output. A binary that skips its gate succeeds, too, which must not count as green.
fn verdict(binary: &Binary, stdout: &str) -> Verdict {
    let mut lines = stdout.lines().rev();
    let Some(last) = lines.next() else { return Verdict::Unknown };
    let ["gate", gate] = binary.arguments else { return Verdict::Green(last.to_owned()) };
    let line = lines.find_map(|line| line.strip_prefix(gate)?.strip_prefix(' ')).map(str::trim);
    match line {
        Some(line) if last.starts_with("DONE total=1 red=0 skipped=0 ") => {
            Verdict::Green(line.trim_start_matches("green").trim().to_owned())
        }
        Some(line) if last.starts_with("DONE total=1 red=0 skipped=1 ") => Verdict::Skipped(line.to_owned()),
        _ => Verdict::Unknown,
    }
}

/// The pinned model `name`, where the store has it.
fn fetched(world: &World<'_>, name: &str) -> Option<PathBuf> {
    let (pins, store) = (world.plan().pins.value.as_ref()?, world.plan().store.value.as_ref()?);
    let model = pins.pin.models.iter().find(|model| model.name.as_str() == name)?;
    model::find(store, model).ok().flatten()
}

/// The binary for `arch`: built now where that is possible, else as it was copied here; or why there is none.
fn binary_for(world: &World<'_>, arch: Arch) -> Result<Result<PathBuf, String>> {
    let path = gpu::binary(world.workspace, &arch, world.request.asks_for_libnvvm());
    match world.plan().problem() {
        None => {
            let gpu = GpuBuild::prepare(world.plan(), &BTreeSet::from([arch]), world.env, &Silent)?;
            Ok(Ok(gpu.build(&arch)?.binary))
        }
        Some(_) if path.is_file() => {
            let shown = path.display();
            let progress = progress::on_stderr("gate", true);
            progress.warn(&format!("{shown} is used as it is: nothing can be built here"));
            Ok(Ok(path))
        }
        Some(problem) => {
            let what = problem.message.lines().next().unwrap_or_default();
            Ok(Err(format!("there is no {}, and it cannot be built here: {what}", path.display())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gates of the binary, by name and defect, as its source lists them.
    fn listed() -> Vec<(String, String)> {
        let source = include_str!("../../../kernels/device/src/gates.rs");
        let field = |entry: &str, key: &str| {
            let (_, rest) = entry.split_once(&format!("{key}: \"")).unwrap();
            rest.split_once('"').unwrap().0.to_owned()
        };
        let (_, list) = source.split_once("const GATES:").unwrap();
        let (list, _) = list.split_once("];\n").unwrap();
        list.split("Gate {").skip(1).map(|entry| (field(entry, "name"), field(entry, "plant"))).collect()
    }

    #[test]
    fn every_gate_of_the_binary_has_a_row_with_its_defect() {
        let rows: Vec<_> = BINARY
            .iter()
            .filter_map(|binary| match (binary.arguments, binary.defect_arguments) {
                (["gate", name], ["--plant", defect]) => {
                    assert_eq!(binary.name, format!("device/{name}"));
                    Some(((*name).to_owned(), (*defect).to_owned()))
                }
                _ => None,
            })
            .collect();
        assert_eq!(rows, listed());
        assert!(rows.len() >= 5, "{rows:?}");
    }

    #[test]
    fn only_a_check_that_was_made_is_green() {
        let binary = |name: &str| BINARY.iter().find(|binary| binary.name == name).unwrap();
        let batch = binary("device/batch");
        let green = "batch      green  12 compared (0.1 s)\nDONE total=1 red=0 skipped=0 wall=0.1\n";
        assert_eq!(verdict(batch, green), Verdict::Green("12 compared (0.1 s)".into()));
        let skipped = "batch      skipped: no driver (0.0 s)\nDONE total=1 red=0 skipped=1 wall=0.0\n";
        assert_eq!(verdict(batch, skipped), Verdict::Skipped("skipped: no driver (0.0 s)".into()));
        for text in
            ["", "\n", "batch      green  12 compared (0.1 s)\n", "DONE total=1 red=0 skipped=0 wall=0\n"]
        {
            assert_eq!(verdict(batch, text), Verdict::Unknown, "{text:?}");
        }
        // A gate whose name begins the same is another one.
        let kquant = "kquant-fused    green  1 compared (0.1 s)\nDONE total=1 red=0 skipped=0 wall=0.1\n";
        assert_eq!(verdict(binary("device/kquant"), kquant), Verdict::Unknown);
        // Another gate, or more than the one that was asked for.
        assert_eq!(verdict(binary("device/graph"), green), Verdict::Unknown);
        assert_eq!(verdict(batch, &green.replace("total=1", "total=2")), Verdict::Unknown);
        let selftest = verdict(binary("device/selftest"), "5 compared, 0 failed\n");
        assert_eq!(selftest, Verdict::Green("5 compared, 0 failed".into()));
    }
}
