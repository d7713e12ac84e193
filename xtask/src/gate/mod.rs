//! Gates: checks that need the real backend or a card, each with a name, what it needs, and a defect that it catches.
//!
//! A gate ends green, red, or skipped; a skipped one says by name what is missing and the command that would run it. The
//! checks themselves are in [`toolchain`] and [`device`]; here is what they share.

pub mod device;
pub mod offline;
pub mod scratch;
pub mod toolchain;

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::base::env::Env;
use crate::build::gpu::{Built, GpuBuild};
use crate::machine::arch::Arch;
use crate::plan::{Plan, Request};
use crate::report::error::{Error, Exit, Result};
use crate::report::progress::Silent;

/// What a gate cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Need {
    /// The backend and everything else that `build --arch` uses.
    Backend,
    /// An NVIDIA card, here or at another machine that has the built binary.
    Card,
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Need::Backend => "backend",
            Need::Card => "card",
        })
    }
}

/// How a gate ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// What it checks holds.
    Green {
        /// What was found, one phrase.
        found: String,
    },
    /// What it checks does not hold, or the check could not be made although all that it needs is there.
    Red {
        /// Why, one or more lines.
        reason: String,
    },
    /// Something that it needs is not there.
    Skipped {
        /// What is missing.
        reason: String,
        /// The command that would run it.
        run: String,
    },
}

impl Outcome {
    /// Red, for `reason`.
    pub fn red(reason: impl Into<String>) -> Self {
        Outcome::Red { reason: reason.into() }
    }

    /// Green, having found `found`.
    pub fn green(found: impl Into<String>) -> Self {
        Outcome::Green { found: found.into() }
    }
}

/// A check.
type Check = Box<dyn Fn(&World<'_>, Defect) -> Result<Outcome>>;

/// Whether the gate's defect is seeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// The check runs on what is there.
    None,
    /// The check runs on what is there with the gate's defect in it, and must end red.
    Seeded,
}

/// A named check.
pub struct Gate {
    /// `toolchain/...` or `device/...`.
    pub name: String,
    /// What holds when it is green, one phrase.
    pub about: &'static str,
    /// What it cannot do without.
    pub needs: &'static [Need],
    /// The defect that `--seed-defect` puts in, one phrase.
    pub defect: &'static str,
    check: Check,
}

impl Gate {
    fn new(
        name: impl Into<String>,
        about: &'static str,
        needs: &'static [Need],
        defect: &'static str,
        check: impl Fn(&World<'_>, Defect) -> Result<Outcome> + 'static,
    ) -> Self {
        Gate { name: name.into(), about, needs, defect, check: Box::new(check) }
    }

    /// Runs the check, unless what it needs is missing. An error of the check makes it red.
    pub fn run(&self, world: &World<'_>, defect: Defect) -> (Outcome, Duration) {
        let started = Instant::now();
        let outcome = self.missing(world).unwrap_or_else(|| {
            (self.check)(world, defect).unwrap_or_else(|error| Outcome::red(error.to_string()))
        });
        (outcome, started.elapsed())
    }

    fn missing(&self, world: &World<'_>) -> Option<Outcome> {
        if !self.needs.contains(&Need::Backend) {
            return None;
        }
        // What is not set up is missing; what is there and wrong is for the check to report.
        let problem = world.plan().problem().filter(|problem| problem.exit == Exit::Machine)?;
        let what = problem.message.lines().next().unwrap_or_default();
        let run = format!("cargo xtask setup && cargo xtask gate {}", self.name);
        Some(Outcome::Skipped { reason: format!("no backend is set up: {what}"), run })
    }
}

/// Where gates run.
pub struct World<'a> {
    /// The user's checkout, of which nothing but target/ is written.
    pub workspace: &'a Path,
    /// The process environment.
    pub env: &'a Env,
    /// What the user asked for.
    pub request: &'a Request,
    /// The architectures to build for.
    pub archs: &'a [Arch],
    /// The user named them.
    pub archs_named: bool,
    plan: OnceCell<Plan>,
}

impl<'a> World<'a> {
    /// A world whose plan is not resolved yet.
    pub fn new(
        workspace: &'a Path,
        env: &'a Env,
        request: &'a Request,
        archs: &'a [Arch],
        archs_named: bool,
    ) -> Self {
        World { workspace, env, request, archs, archs_named, plan: OnceCell::new() }
    }

    /// The user's plan.
    pub fn plan(&self) -> &Plan {
        self.plan.get_or_init(|| Plan::resolve(self.request, self.workspace, self.env))
    }
}

/// Every gate for `archs`.
pub fn all(archs: &[Arch]) -> Vec<Gate> {
    let mut gates = toolchain::gates(archs);
    gates.extend(device::gates());
    gates
}

/// The result for a gate that must see a refusal: green exactly when `result` is a refusal of kind `code`.
fn refused(result: Result<()>, code: &crate::report::error::Code) -> Outcome {
    match result {
        Err(error) if error.exit() == Exit::Refusal && error.code() == code => {
            Outcome::green(format!("refused: {} (exit {})", code.id, Exit::Refusal.status()))
        }
        Err(error) => Outcome::red(format!(
            "expected a refusal {} (exit 70), found {} (exit {}): {error}",
            code.id,
            error.code().id,
            error.exit().status()
        )),
        Ok(()) => Outcome::red(format!("it was not refused, expected {} (exit 70)", code.id)),
    }
}

/// An error of a gate's own preparations.
fn unprepared(what: &str, error: Error) -> Error {
    error.context(format!("the gate could not be prepared: {what}"))
}

fn built(plan: &Plan, arch: Arch, world: &World<'_>) -> Result<Built> {
    GpuBuild::prepare(plan, &BTreeSet::from([arch]), world.env, &Silent)?.build(&arch)
}

/// The architecture of gates for which one is enough.
fn one_arch(world: &World<'_>) -> Result<Arch> {
    let last = world.archs.last().copied();
    last.ok_or_else(|| Error::new(&crate::report::error::BUG, "there is no architecture to build for"))
}

/// The last lines of a long output.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(12);
    lines.get(from..).unwrap_or_default().iter().map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_gate_has_a_name_of_its_own_and_a_defect() {
        let archs: Vec<Arch> = vec!["sm_86".parse().unwrap(), "sm_90".parse().unwrap()];
        let gates = all(&archs);
        let names: BTreeSet<_> = gates.iter().map(|gate| gate.name.as_str()).collect();
        assert_eq!(names.len(), gates.len());
        for gate in &gates {
            let known = gate.name.starts_with("toolchain/") || gate.name.starts_with("device/");
            assert!(known && !gate.about.is_empty() && !gate.defect.is_empty(), "{}", gate.name);
        }
    }

    #[test]
    fn only_the_expected_refusal_is_green() {
        let wanted = &crate::store::record::CHANGED;
        assert!(matches!(refused(Err(Error::new(wanted, "x")), wanted), Outcome::Green { .. }));
        assert!(matches!(refused(Ok(()), wanted), Outcome::Red { .. }));
        for other in [Error::new(&crate::backend::MISSING, "x"), Error::new(&crate::source::CHANGED, "x")] {
            assert!(matches!(refused(Err(other), wanted), Outcome::Red { .. }));
        }
        let softened = Error::new(wanted, "x").with_exit(Exit::Machine);
        assert!(matches!(refused(Err(softened), wanted), Outcome::Red { .. }));
    }
}
