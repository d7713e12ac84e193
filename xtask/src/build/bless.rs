//! Recording the PTX anew: made by everything that PROVENANCE verifies, so that all digests are of the same sources. An entry
//! that spills or uses local memory is recorded only with a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::base::atomic::write_atomic;
use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::build::recorded::{self, Scanning, build_and_scan};
use crate::machine::cuda::Ptxas;
use crate::machine::nvvm;
use crate::pins::{Pin, PtxCompiler};
use crate::plan::{Plan, Request};
use crate::ptx::driver::Card;
use crate::ptx::record::{self, Digests};
use crate::ptx::table::{self, Reason, Rows, Table};
use crate::report::error::{Error, Result};
use crate::store;

crate::codes! {
    NEEDS_REASON = "KILN-0151", Machine, "a spill or local memory needs a reason",
        "An entry that spills registers or uses local memory is slow for a reason that somebody should have thought \
         about. Give it with `--reason TEXT`: it is recorded with today's date.";
    NO_PTXAS = "KILN-0152", Machine, "there is no ptxas",
        "Registers, shared memory and spills are read from `ptxas -v`. It is part of the CUDA toolkit.";
    OTHER_RELEASE = "KILN-0156", Machine, "the toolkit's libNVVM is not the one to record",
        "`ptx bless` makes the PTX with everything that PROVENANCE verifies. The libNVVM of the CUDA toolkit here is of \
         another release than the one whose turn it is, so that its digests would be recorded under a wrong name.";
}

/// What to record.
pub struct Blessing<'a> {
    /// The compiler of the first build, and where everything is.
    pub request: &'a Request,
    /// Architectures beside those that are recorded.
    pub archs: &'a [String],
    /// Also ask the driver of the first card for local memory.
    pub driver: bool,
    /// Why spills and local memory are accepted.
    pub reason: Option<&'a str>,
}

/// A state of the sources and their PTX, ready to be recorded.
pub struct State {
    source: Sha256,
    digests: Digests,
    table: Table,
    /// What the record gains, loses and changes.
    pub changes: Vec<String>,
}

impl Blessing<'_> {
    /// Builds with every verified compiler and reads what each entry needs. Writes nothing but what a build writes.
    ///
    /// # Errors
    /// Something does not build, a compiler is of another release than the verified one ([`OTHER_RELEASE`]), or memory is
    /// used without a reason ([`NEEDS_REASON`]).
    pub fn examine(&self, workspace: &Path, env: &Env) -> Result<State> {
        let pin = Pin::load(workspace)?;
        let recorded = record::digests(&pin);
        let table = Table::load(workspace)?.unwrap_or_default();
        let mut all: Vec<String> = recorded.keys().map(|(arch, _)| arch.to_string()).collect();
        all.extend(self.archs.iter().cloned());
        let archs = recorded::archs(&all, &recorded)?;
        let card = Card::open(self.driver)?;

        // The recorded hash of the sources stands for all digests, so all of them are made anew.
        let source = record::source_hash(workspace)?;
        let plan = Plan::resolve(self.request, workspace, env);
        let mut ptxas = Some(require_ptxas(&plan)?.full.clone());
        let mut scans = build_and_scan(&plan, &archs, card.as_ref(), env)?;
        let done: BTreeSet<PtxCompiler> = scans.iter().map(|scan| scan.llvm).collect();
        for compiler in verified(&pin).difference(&done) {
            let plan = self.plan_with(*compiler, workspace, env)?;
            ptxas = ptxas.filter(|ptxas| plan.ptxas.value.as_ref().is_some_and(|other| other.full == *ptxas));
            scans.extend(build_and_scan(&plan, &archs, card.as_ref(), env)?);
        }

        let mut digests = Digests::new();
        for scan in &scans {
            digests.insert((scan.arch.clone(), scan.llvm), scan.digests());
        }
        let rows = self.explained(&scans, &recorded, &table)?;
        let changes = changes(&scans, &recorded, &table);
        Ok(State { source, digests, table: Table { ptxas, rows }, changes })
    }

    /// A plan whose PTX is made by `compiler`.
    fn plan_with(&self, compiler: PtxCompiler, workspace: &Path, env: &Env) -> Result<Plan> {
        let llc = match compiler {
            PtxCompiler::Llc(major) => major.to_string(),
            PtxCompiler::LibNvvm(_) => nvvm::WORD.to_owned(),
        };
        let request = Request { llc: Some(llc.into()), ..self.request.clone() };
        let plan = Plan::resolve(&request, workspace, env);
        let found = plan.lowering()?.key();
        if found != compiler {
            return Err(Error::new(
                &OTHER_RELEASE,
                format!("PROVENANCE verifies {compiler}, and the toolkit here has {found}"),
            )
            .hint("set CUDA_TOOLKIT_PATH to a toolkit of that release, or take it out of PROVENANCE"));
        }
        Ok(plan)
    }

    /// The rows of all scans, each that needs a reason with one: its old one while it needs the same.
    fn explained(&self, scans: &[Scanning], recorded: &Digests, table: &Table) -> Result<Rows> {
        let mut rows = Rows::new();
        let mut unexplained = Vec::new();
        for scan in scans {
            let key = (scan.arch.clone(), scan.llvm);
            let before = table.rows.get(&key);
            let mut found = scan.rows();
            for (name, row) in &mut found {
                let old = before.and_then(|rows| rows.get(name));
                // Without a card here the number of the same PTX stays.
                let same = recorded.get(&key).and_then(|digests| digests.get(name))
                    == scan.entries.get(name).map(|scanned| &scanned.digest);
                row.local = row.local.or_else(|| old.filter(|_| same)?.local);
                if row.nonzero().is_empty() {
                    continue;
                }
                let kept = old.filter(|old| old.nonzero() == row.nonzero());
                row.reason =
                    kept.and_then(|old| old.reason.clone()).or_else(|| Reason::new(&today(), self.reason?));
                if row.reason.is_none() {
                    let needs = row.nonzero().join(", ");
                    unexplained.push(format!("{} {} {name}: {needs}", scan.arch, scan.llvm));
                }
            }
            rows.insert(key, found);
        }
        if !unexplained.is_empty() {
            return Err(unexplained
                .into_iter()
                .fold(Error::new(&NEEDS_REASON, "entries spill or use local memory"), Error::cause)
                .hint("give the reason with --reason TEXT, or mend the kernel"));
        }
        Ok(rows)
    }
}

impl State {
    /// Records it; says whether anything changed.
    ///
    /// # Errors
    /// One of the two files cannot be written.
    pub fn write(&self, workspace: &Path) -> Result<bool> {
        let path = Table::path(workspace);
        let text = self.table.text();
        let same_table = fs_err::read(&path).is_ok_and(|bytes| bytes == text.as_bytes());
        if !same_table {
            write_atomic(&path, text.as_bytes(), None)?;
        }
        Ok(record::write(workspace, &self.source, &self.digests)? || !same_table)
    }
}

/// Everything that may make PTX.
fn verified(pin: &Pin) -> BTreeSet<PtxCompiler> {
    let majors = pin.llvm.verified.iter().copied().map(PtxCompiler::Llc);
    majors.chain(pin.libnvvm.iter().copied().map(PtxCompiler::LibNvvm)).collect()
}

fn require_ptxas(plan: &Plan) -> Result<&Ptxas> {
    plan.ptxas.value.as_ref().ok_or_else(|| {
        Error::new(&NO_PTXAS, "no ptxas was found in the CUDA toolkit or on PATH")
            .hint("set CUDA_TOOLKIT_PATH to the root of a toolkit that has bin/ptxas")
    })
}

/// What the record gains, loses and changes.
fn changes(scans: &[Scanning], recorded: &Digests, table: &Table) -> Vec<String> {
    let (no_digests, no_rows) = (BTreeMap::new(), BTreeMap::new());
    let mut lines = Vec::new();
    for scan in scans {
        let key = (scan.arch.clone(), scan.llvm);
        let digests = recorded.get(&key).unwrap_or(&no_digests);
        let rows = table.rows.get(&key).unwrap_or(&no_rows);
        let digests = table::digest_differences(digests, &scan.digests());
        let rows = table::differences(rows, &scan.rows(), true);
        // An entry that is new or gone is so in both: once is enough.
        let rows = rows.into_iter().filter(|line| !line.contains(": new, ") && !line.contains(": gone, "));
        lines.extend(
            digests.into_iter().chain(rows).map(|line| format!("{} {}: {line}", scan.arch, scan.llvm)),
        );
    }
    lines
}

fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
    store::utc(seconds).chars().take(10).collect()
}
