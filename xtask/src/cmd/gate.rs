//! `gate`: runs the checks that need the real backend or a card.

use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use clap::Args;
use serde::Serialize;

use crate::base::env::Env;
use crate::cmd::cli::Common;
use crate::gate::{self, Defect, Gate as Check, Need, Outcome, World};
use crate::machine::arch::Arch;
use crate::report::decision::Thoroughness;
use crate::report::error::{Error, Result};
use crate::report::output;

crate::codes! {
    NO_GATE = "KILN-0140", Machine, "no gate has that name",
        "The filter is a part of a gate's name; `--seed-defect` takes a whole name. Nothing matches, so nothing would be \
         checked, and nothing is not success.";
}

/// Run the checks that need the real backend or a card
///
/// Each ends green, red, or skipped by name with the command that would run it. Writes target/, and scratch copies of the
/// checkout in TMPDIR, which are removed. Exit code 0 only if no gate is red.
#[derive(Debug, Args)]
pub struct Gate {
    #[command(flatten)]
    common: Common,

    /// Run only gates whose name holds this text
    #[arg(value_name = "FILTER")]
    filter: Option<String>,

    /// The GPU architectures to build for; may be given several times [default: sm_86 and sm_90]
    #[arg(long, value_name = "sm_NN[a|f]")]
    arch: Vec<String>,

    /// Count skipped gates as red
    #[arg(long)]
    require_all: bool,

    /// Seed this gate's defect and run it: it must end red
    #[arg(long, value_name = "NAME", alias = "plant", conflicts_with = "filter")]
    seed_defect: Option<String>,

    /// List the gates, what they need and what defect can be seeded, and run none
    #[arg(long)]
    list: bool,

    /// Print one JSON document on standard output (schema kiln.gate/1, described in docs/gates.md); the lines go to
    /// standard error
    #[arg(long)]
    json: bool,
}

/// The architectures without `--arch`: the oldest and the newest card that the kernels are tuned for.
const ARCHS: [&str; 2] = ["sm_86", "sm_90"];

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    total: usize,
    red: usize,
    skipped: usize,
    wall_seconds: f64,
    gates: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    name: String,
    about: &'static str,
    needs: &'static [Need],
    #[serde(flatten)]
    outcome: Outcome,
    seconds: f64,
}

#[derive(Serialize)]
struct List<'a> {
    schema: &'static str,
    gates: Vec<Listed<'a>>,
}

#[derive(Serialize)]
struct Listed<'a> {
    name: &'a str,
    about: &'a str,
    needs: &'a [Need],
    defect: &'a str,
    /// The former name of `defect`.
    plant: &'a str,
}

impl Gate {
    /// Runs the verb.
    ///
    /// # Errors
    /// No gate matches. A red gate is not an error but an exit status.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let named: Vec<&str> = self.arch.iter().map(String::as_str).collect();
        let texts = if named.is_empty() { ARCHS.to_vec() } else { named };
        let archs: Vec<Arch> = texts.iter().map(|text| text.parse()).collect::<Result<_>>()?;
        let gates = self.chosen(gate::all(&archs))?;
        if self.list {
            return self.print_list(&gates);
        }
        let request = self.common.request(Thoroughness::First);
        let world = World::new(workspace, env, &request, &archs, !self.arch.is_empty());
        let defect = if self.seed_defect.is_some() { Defect::Seeded } else { Defect::None };
        let started = Instant::now();
        let mut lines = Vec::new();
        for gate in &gates {
            let (mut outcome, took) = gate.run(&world, defect);
            if let (true, Outcome::Skipped { reason, run }) = (self.require_all, &outcome) {
                outcome = Outcome::red(format!("skipped, and --require-all is given: {reason}; run: {run}"));
            }
            let seconds = took.as_secs_f64();
            self.say(&describe(&gate.name, &outcome, seconds))?;
            let (name, about, needs) = (gate.name.clone(), gate.about, gate.needs);
            lines.push(Line { name, about, needs, outcome, seconds });
        }
        let count = |is: fn(&Outcome) -> bool| lines.iter().filter(|line| is(&line.outcome)).count();
        let red = count(|outcome| matches!(outcome, Outcome::Red { .. }));
        let skipped = count(|outcome| matches!(outcome, Outcome::Skipped { .. }));
        let wall_seconds = started.elapsed().as_secs_f64();
        self.say(&format!("DONE total={} red={red} skipped={skipped} wall={wall_seconds:.1}s", lines.len()))?;
        if self.json {
            let total = lines.len();
            let report = Report { schema: "kiln.gate/1", total, red, skipped, wall_seconds, gates: lines };
            output::json(&report)?;
        }
        Ok(u8::from(red > 0))
    }

    fn chosen(&self, gates: Vec<Check>) -> Result<Vec<Check>> {
        let what = match (&self.seed_defect, &self.filter) {
            (Some(name), _) => format!("--seed-defect {name}"),
            (None, Some(filter)) => format!("the filter {filter:?}"),
            (None, None) => return Ok(gates),
        };
        let wanted = |gate: &Check| match (&self.seed_defect, &self.filter) {
            (Some(name), _) => gate.name == *name,
            (None, filter) => filter.as_ref().is_none_or(|filter| gate.name.contains(filter.as_str())),
        };
        let names: Vec<String> = gates.iter().map(|gate| gate.name.clone()).collect();
        let chosen: Vec<Check> = gates.into_iter().filter(wanted).collect();
        if chosen.is_empty() {
            return Err(Error::new(&NO_GATE, format!("{what} matches no gate"))
                .hint(format!("the gates are: {}", names.join(", "))));
        }
        Ok(chosen)
    }

    fn print_list(&self, gates: &[Check]) -> Result<u8> {
        if self.json {
            let list: Vec<_> = gates
                .iter()
                .map(|gate| Listed {
                    name: &gate.name,
                    about: gate.about,
                    needs: gate.needs,
                    defect: gate.defect,
                    plant: gate.defect,
                })
                .collect();
            output::json(&List { schema: "kiln.gate-list/1", gates: list })?;
            return Ok(0);
        }
        for gate in gates {
            let needs: Vec<String> = gate.needs.iter().map(Need::to_string).collect();
            output::line(&format!("{}: {}", gate.name, gate.about))?;
            output::line(&format!("    needs {}; --seed-defect: {}", needs.join(", "), gate.defect))?;
        }
        Ok(0)
    }

    /// A line for people, which is not in the way of JSON.
    fn say(&self, line: &str) -> Result<()> {
        if self.json {
            // With standard error closed there is nobody to tell.
            let _ = writeln!(std::io::stderr().lock(), "{line}");
            return Ok(());
        }
        output::line(line)
    }
}

fn describe(name: &str, outcome: &Outcome, seconds: f64) -> String {
    match outcome {
        Outcome::Green { found } => format!("green    {name} ({seconds:.1}s): {found}"),
        Outcome::Red { reason } => {
            format!("RED      {name} ({seconds:.1}s): {}", reason.trim_end().replace('\n', "\n           "))
        }
        Outcome::Skipped { reason, run } => format!("skipped  {name}: {reason}\n           run: {run}"),
    }
}
