//! `ptx`: what the kernels' PTX is, entry by entry, and whether it is the recorded one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::base::env::Env;
use crate::build::bless::Blessing;
use crate::build::recorded;
use crate::cmd::cli::Common;
use crate::machine::cuda;
use crate::pins::Pin;
use crate::plan::Plan;
use crate::ptx::compare::{self, Difference};
use crate::ptx::driver::Card;
use crate::ptx::record;
use crate::ptx::scan::{self, Scanned};
use crate::ptx::table::Table;
use crate::report::decision::Thoroughness;
use crate::report::error::{Exit, Result};
use crate::report::output;
use crate::report::progress;

/// Look at the kernels' PTX, compare it with the record, or record it
#[derive(Debug, Args)]
pub struct Ptx {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Scan(Scan),
    Check(Check),
    Bless(Bless),
    Diff(Diff),
}

/// Print for every entry its digest, instructions, registers, shared memory and spills
///
/// Builds for each --arch first, unless PTX is named. Writes what `build` writes.
#[derive(Debug, Args)]
struct Scan {
    #[command(flatten)]
    common: Common,

    /// Build for this GPU architecture and scan its PTX; may be given several times
    #[arg(long, value_name = "sm_NN[a|f]", conflicts_with = "paths", required_unless_present = "paths")]
    arch: Vec<String>,

    /// PTX files, folders of them, or builds such as target/device/sm_90: scanned together, nothing is built
    #[arg(value_name = "PTX")]
    paths: Vec<PathBuf>,

    /// Also load the PTX with the driver of the first card here, to read the local memory that it gives each entry
    #[arg(long)]
    driver: bool,

    /// Print one JSON document (schema kiln.ptx-scan/1, described in docs/ptx.md)
    #[arg(long)]
    json: bool,
}

/// Compare the kernels' sources and PTX with PROVENANCE and kernels/ptx-table.toml
///
/// Without the backend only the sources are compared, which needs nothing. Writes what `build` writes.
#[derive(Debug, Args)]
struct Check {
    #[command(flatten)]
    common: Common,

    /// Compare for this GPU architecture alone; may be given several times [default: all that are recorded]
    #[arg(long, value_name = "sm_NN[a|f]")]
    arch: Vec<String>,

    /// Also load the PTX with the driver of the first card here, to read the local memory that it gives each entry
    #[arg(long)]
    driver: bool,

    /// Compare the sources alone, even if the backend is there
    #[arg(long, conflicts_with = "arch")]
    sources: bool,

    /// Print one JSON document (schema kiln.ptx-check/1, described in docs/ptx.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct CheckReport {
    schema: &'static str,
    /// What was compared beside the sources, all of it as recorded.
    compared: Vec<Compared>,
    /// Why no PTX was compared.
    not_compared: Option<String>,
}

#[derive(Serialize)]
struct Compared {
    arch: String,
    llvm: String,
    entries: usize,
}

/// Record the PTX: its digests in PROVENANCE, what each entry needs in kernels/ptx-table.toml
///
/// Builds for every architecture that is recorded and for --arch, with every llc major and libNVVM that PROVENANCE
/// verifies. Writes both files and what `build` writes.
#[derive(Debug, Args)]
struct Bless {
    #[command(flatten)]
    common: Common,

    /// Record this GPU architecture, too; may be given several times
    #[arg(long, value_name = "sm_NN[a|f]")]
    arch: Vec<String>,

    /// Also load the PTX with the driver of the first card here, to read the local memory that it gives each entry
    #[arg(long)]
    driver: bool,

    /// Why spills or local memory are accepted, where there are any
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,

    /// Print one JSON document (schema kiln.ptx-bless/1, described in docs/ptx.md)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct BlessReport {
    schema: &'static str,
    written: bool,
    /// What the record gained, lost and changed.
    changes: Vec<String>,
}

/// Say for every entry whether two builds are identical, reordered only, or differ, and in what
///
/// Reads PTX alone: no compiler and no card. Exit code 0 if all entries are identical, else 1.
#[derive(Debug, Args)]
struct Diff {
    /// A PTX file, a folder of them, or a build such as target/device/sm_90
    a: PathBuf,

    /// The same of the other build
    b: PathBuf,

    /// Print one JSON document (schema kiln.ptx-diff/1, described in docs/ptx.md)
    #[arg(long)]
    json: bool,
}

impl Ptx {
    /// Runs the verb.
    ///
    /// # Errors
    /// Whatever the verb reports.
    pub fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        match self.verb {
            Verb::Scan(verb) => verb.run(workspace, env),
            Verb::Check(verb) => verb.run(workspace, env),
            Verb::Bless(verb) => verb.run(workspace, env),
            Verb::Diff(verb) => verb.run(env),
        }
    }
}

impl Scan {
    fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let card = Card::open(self.driver)?;
        let mut report = ScanReport { schema: "kiln.ptx-scan/1", ptxas: None, scans: Vec::new() };
        if self.arch.is_empty() {
            let ptxas = cuda::find_ptxas_alone(env);
            let mut files = Vec::new();
            for path in &self.paths {
                files.extend(scan::files(&env.absolute(path)?)?);
            }
            let entries = scan::scan(&files, ptxas.as_ref(), card.as_ref(), env)?;
            report.ptxas = ptxas.map(|ptxas| ptxas.full);
            report.scans.push(ScanOf::new(None, None, &files, &entries));
        } else {
            let archs = recorded::parse(&self.arch)?;
            let plan = Plan::resolve(&self.common.request(Thoroughness::First), workspace, env);
            for scanning in recorded::build_and_scan(&plan, &archs, card.as_ref(), env)? {
                let (arch, llvm) = (scanning.arch.to_string(), scanning.llvm.to_string());
                report.scans.push(ScanOf::new(Some(arch), Some(llvm), &scanning.files, &scanning.entries));
            }
            report.ptxas = plan.ptxas.value.map(|ptxas| ptxas.full);
        }
        if self.json {
            output::json(&report)?
        } else {
            output::line(&report.text())?
        }
        Ok(0)
    }
}

#[derive(Serialize)]
struct ScanReport {
    schema: &'static str,
    /// The ptxas that registers, shared memory and spills are of; null when there is none.
    ptxas: Option<String>,
    scans: Vec<ScanOf>,
}

#[derive(Serialize)]
struct ScanOf {
    arch: Option<String>,
    llvm: Option<String>,
    files: Vec<String>,
    entries: Vec<EntryOf>,
}

#[derive(Serialize)]
struct EntryOf {
    name: String,
    digest: String,
    registers: Option<u32>,
    shared: Option<u32>,
    stack: Option<u32>,
    spill_stores: Option<u32>,
    spill_loads: Option<u32>,
    local: Option<u32>,
    instructions: usize,
    mix: BTreeMap<String, usize>,
}

impl ScanOf {
    fn new(
        arch: Option<String>,
        llvm: Option<String>,
        files: &[PathBuf],
        entries: &BTreeMap<String, Scanned>,
    ) -> Self {
        let entries = entries.iter().map(|(name, Scanned { digest, row })| EntryOf {
            name: name.clone(),
            digest: digest.to_string(),
            registers: row.usage.map(|usage| usage.registers),
            shared: row.usage.map(|usage| usage.shared),
            stack: row.usage.map(|usage| usage.stack),
            spill_stores: row.usage.map(|usage| usage.spill_stores),
            spill_loads: row.usage.map(|usage| usage.spill_loads),
            local: row.local,
            instructions: row.instructions,
            mix: row.mix.clone(),
        });
        let files = files.iter().map(|path| path.display().to_string()).collect();
        ScanOf { arch, llvm, files, entries: entries.collect() }
    }
}

impl ScanReport {
    fn text(&self) -> String {
        let mut text = String::new();
        for scan in &self.scans {
            let title: Vec<&str> = scan.arch.iter().chain(&scan.llvm).map(String::as_str).collect();
            if !title.is_empty() {
                text.push_str(&format!("{}\n", title.join(" ")));
            }
            let header = [
                "entry", "digest", "regs", "shared", "stack", "spill st", "spill ld", "local", "instr", "mix",
            ];
            let mut lines = vec![header.map(str::to_owned)];
            for entry in &scan.entries {
                let show = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
                let mix: Vec<String> =
                    entry.mix.iter().map(|(class, count)| format!("{class} {count}")).collect();
                lines.push([
                    entry.name.clone(),
                    entry.digest.chars().take(12).collect(),
                    show(entry.registers),
                    show(entry.shared),
                    show(entry.stack),
                    show(entry.spill_stores),
                    show(entry.spill_loads),
                    show(entry.local),
                    entry.instructions.to_string(),
                    mix.join(", "),
                ]);
            }
            text.push_str(&columns(&lines));
        }
        match &self.ptxas {
            Some(ptxas) => text.push_str(&format!("registers, memory and spills by ptxas {ptxas}")),
            None => text.push_str("no ptxas was found: registers, memory and spills are unknown"),
        }
        text
    }
}

/// Left-aligned columns, two spaces apart.
fn columns<const N: usize>(lines: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for line in lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in lines {
        let cells: Vec<String> =
            line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

impl Check {
    fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let pin = Pin::load(workspace)?;
        let digests = record::digests(&pin);
        let table = Table::load(workspace)?.unwrap_or_default();
        record::check_sources(workspace, &pin)?;
        recorded::same_entries(&digests, &table)?;
        if !self.json {
            output::line("sources: as recorded")?;
        }
        if self.sources {
            return self.report(Vec::new(), Some("only the sources were asked for".to_owned()));
        }
        let plan = Plan::resolve(&self.common.request(Thoroughness::First), workspace, env);
        // A toolchain that is not set up is no failure of the PTX; one that was tampered with is a failure.
        if let Some(problem) = plan.problem().filter(|problem| problem.exit == Exit::Machine) {
            let why = format!("nothing can be built: {}", first_line(&problem.message));
            if !self.json {
                output::line(&format!("PTX: not compared, since {why}"))?;
            }
            return self.report(Vec::new(), Some(why));
        }
        let archs = recorded::archs(&self.arch, &digests)?;
        let card = Card::open(self.driver)?;
        let scans = recorded::build_and_scan(&plan, &archs, card.as_ref(), env)?;
        let same_ptxas = recorded::same_ptxas(&plan, &table);
        if !same_ptxas {
            let is = plan.ptxas.value.as_ref().map_or("not there", |ptxas| &ptxas.full);
            let was = table.ptxas.as_deref().unwrap_or("no ptxas");
            progress::on_stderr("ptx", self.common.quiet).warn(&format!(
                "ptxas is {is}, the table is of {was}: registers, memory and spills are not compared"
            ));
        }
        recorded::refuse(recorded::compare_with_record(&scans, &digests, &table, same_ptxas)?)?;
        let compared = scans.iter().map(|scan| Compared {
            arch: scan.arch.to_string(),
            llvm: scan.llvm.to_string(),
            entries: scan.entries.len(),
        });
        self.report(compared.collect(), None)
    }

    fn report(&self, compared: Vec<Compared>, not_compared: Option<String>) -> Result<u8> {
        if self.json {
            output::json(&CheckReport { schema: "kiln.ptx-check/1", compared, not_compared })?;
            return Ok(0);
        }
        for Compared { arch, llvm, entries } in &compared {
            output::line(&format!("{arch} {llvm}: {entries} entries as recorded"))?;
        }
        Ok(0)
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

impl Bless {
    fn run(self, workspace: &Path, env: &Env) -> Result<u8> {
        let request = self.common.request(Thoroughness::First);
        let reason = self.reason.as_deref();
        let asked = Blessing { request: &request, archs: &self.arch, driver: self.driver, reason };
        let state = asked.examine(workspace, env)?;
        if !self.json {
            for line in &state.changes {
                output::line(line)?;
            }
        }
        let written = state.write(workspace)?;
        if self.json {
            output::json(&BlessReport { schema: "kiln.ptx-bless/1", written, changes: state.changes })?;
            return Ok(0);
        }
        output::line(if written {
            "recorded in PROVENANCE and kernels/ptx-table.toml"
        } else {
            "nothing changed: the record is of these sources and this PTX"
        })?;
        Ok(0)
    }
}

#[derive(Serialize)]
struct DiffReport {
    schema: &'static str,
    a: String,
    b: String,
    entries: BTreeMap<String, Difference>,
}

impl Diff {
    fn run(self, env: &Env) -> Result<u8> {
        let read = |path: &Path| scan::read(&scan::files(&env.absolute(path)?)?);
        let entries = compare::entries(&read(&self.a)?, &read(&self.b)?);
        let differ = entries.values().any(|difference| *difference != Difference::Identical);
        if self.json {
            let (a, b) = (self.a.display().to_string(), self.b.display().to_string());
            output::json(&DiffReport { schema: "kiln.ptx-diff/1", a, b, entries })?;
        } else {
            for (name, difference) in &entries {
                output::line(&format!("{name}: {difference}"))?;
            }
            let count = |is: &dyn Fn(&Difference) -> bool| entries.values().filter(|one| is(one)).count();
            output::line(&format!(
                "{} entries: {} identical, {} reordered only, {} differ, {} only in A, {} only in B",
                entries.len(),
                count(&|one| *one == Difference::Identical),
                count(&|one| *one == Difference::Reordered),
                count(&|one| matches!(one, Difference::Differs(_))),
                count(&|one| *one == Difference::Gone),
                count(&|one| *one == Difference::New),
            ))?;
        }
        Ok(u8::from(differ))
    }
}
