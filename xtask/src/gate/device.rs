//! Gates of the kernels on a card: the built binary compares its own bits.
//!
//! The checks are in the binary, so that a machine with a card and without Rust can run them; here is what starts it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::toolchain::tail;
use super::{Gate, Need, Outcome, Plant, World};
use crate::arch::Arch;
use crate::cmd::build::{self, GpuBuild};
use crate::error::Result;
use crate::process::{self, Failure};
use crate::progress::{self, Silent};

const CARD: &[Need] = &[Need::Card];

/// The time that one check may take.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(1800);

/// A check of the binary: the gate's name, what it shows, the arguments, and those that plant its defect.
struct Binary {
    name: &'static str,
    about: &'static str,
    arguments: &'static [&'static str],
    plant: &'static str,
    plant_arguments: &'static [&'static str],
}

static BINARY: &[Binary] = &[Binary {
    name: "device/selftest",
    about: "every kernel gives the same bits on the card, on the CPU and in the reference",
    arguments: &["selftest", "--device", "cuda"],
    plant: "a runner with a wrong order of additions",
    plant_arguments: &["--plant", "lane-order"],
}];

/// All of them.
pub fn gates() -> Vec<Gate> {
    BINARY
        .iter()
        .map(|binary| {
            Gate::new(binary.name, binary.about, CARD, binary.plant, move |world, plant| {
                run(world, binary, plant)
            })
        })
        .collect()
}

fn run(world: &World<'_>, binary: &Binary, plant: Plant) -> Result<Outcome> {
    let mut arguments = binary.arguments.to_vec();
    if plant == Plant::On {
        arguments.extend(binary.plant_arguments);
    }
    let skip = |reason: String, arch: Option<Arch>| {
        let path = arch.map_or_else(
            || "target/device/sm_NN/release/kiln".into(),
            |arch| build::binary(Path::new(""), &arch).display().to_string(),
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
        Ok(output) if output.status.success() => {
            let last = output.stdout.lines().last().unwrap_or("it succeeds");
            Outcome::green(format!("{card}: {last}"))
        }
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

/// The binary for `arch`: built now where that is possible, else as it was copied here; or why there is none.
fn binary_for(world: &World<'_>, arch: Arch) -> Result<Result<PathBuf, String>> {
    let path = build::binary(world.workspace, &arch);
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
