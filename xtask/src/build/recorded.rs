//! What a build's PTX is, entry by entry, and whether it is the recorded one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::build::gpu::GpuBuild;
use crate::machine::arch::Arch;
use crate::pins::{ArchName, Pin, PtxCompiler};
use crate::plan::Plan;
use crate::ptx::driver::Card;
use crate::ptx::record::{self, Digests, NOT_RECORDED};
use crate::ptx::scan::{self, Scanned};
use crate::ptx::table::{self, FILE_NAME, Row, Table};
use crate::report::error::{Error, Result};
use crate::report::progress::Silent;

crate::codes! {
    DIFFERS = "KILN-0150", Refusal, "the PTX is not the recorded one",
        "An entry's PTX, or what it needs, is not what PROVENANCE and kernels/ptx-table.toml say. Both directions \
         count: fewer registers than recorded is a difference, too. `cargo xtask ptx diff` tells what class of \
         instruction differs between two builds; record the new state with `cargo xtask ptx bless`.";
    NO_ARCH = "KILN-0153", Machine, "no architecture was named, and none is recorded",
        "Without `--arch` the architectures are those that PROVENANCE has digests of. Name one with `--arch sm_NN`.";
    RECORD_SPLIT = "KILN-0154", Refusal, "PROVENANCE and the table do not hold the same entries",
        "The digests in PROVENANCE and the rows of kernels/ptx-table.toml are written together by \
         `cargo xtask ptx bless`; one of them was edited or merged alone.";
}

/// A scan of one architecture by one llc.
pub struct Scanning {
    /// The architecture.
    pub arch: ArchName,
    /// What made the PTX.
    pub llvm: PtxCompiler,
    /// The PTX.
    pub files: Vec<PathBuf>,
    /// What was found in it, by entry.
    pub entries: BTreeMap<String, Scanned>,
}

impl Scanning {
    /// The rows of the table.
    pub fn rows(&self) -> BTreeMap<String, Row> {
        self.entries.iter().map(|(name, scanned)| (name.clone(), scanned.row.clone())).collect()
    }

    /// The digest of every entry.
    pub fn digests(&self) -> BTreeMap<String, Sha256> {
        self.entries.iter().map(|(name, scanned)| (name.clone(), scanned.digest)).collect()
    }
}

/// Reads the names of architectures.
///
/// # Errors
/// One is none.
pub fn parse(archs: &[String]) -> Result<BTreeSet<Arch>> {
    archs.iter().map(|text| text.parse()).collect()
}

/// The named architectures, else the recorded ones.
///
/// # Errors
/// A name is none, or there are no architectures at all ([`NO_ARCH`]).
pub fn archs(named: &[String], recorded: &Digests) -> Result<BTreeSet<Arch>> {
    let archs = if named.is_empty() {
        recorded.keys().map(|(arch, _)| arch.as_str().parse()).collect::<Result<_>>()?
    } else {
        parse(named)?
    };
    if archs.is_empty() {
        return Err(Error::new(&NO_ARCH, "no --arch was given, and PROVENANCE records none")
            .hint("name one with --arch sm_NN"));
    }
    Ok(archs)
}

/// Builds for every one of `archs` with the plan's llc, and scans.
///
/// # Errors
/// The build or the scan fails.
pub fn build_and_scan(
    plan: &Plan,
    archs: &BTreeSet<Arch>,
    card: Option<&Card>,
    env: &Env,
) -> Result<Vec<Scanning>> {
    let gpu = GpuBuild::prepare(plan, archs, env, &Silent)?;
    let llvm = gpu.lowering().key();
    let mut scans = Vec::new();
    for arch in archs {
        let files: Vec<PathBuf> = gpu.build(arch)?.ptx.into_iter().map(|(path, _)| path).collect();
        let entries = scan::scan(&files, plan.ptxas.value.as_ref(), card, env)?;
        let name =
            arch.to_string().parse().map_err(|what: String| Error::new(&crate::report::error::BUG, what))?;
        scans.push(Scanning { arch: name, llvm, files, entries });
    }
    Ok(scans)
}

/// Compares which entries PROVENANCE and the table hold.
///
/// # Errors
/// [`RECORD_SPLIT`]
pub fn same_entries(recorded: &Digests, table: &Table) -> Result<()> {
    let of_digests: BTreeSet<_> =
        recorded.iter().flat_map(|(key, entries)| entries.keys().map(move |name| (key, name))).collect();
    let of_table: BTreeSet<_> =
        table.rows.iter().flat_map(|(key, entries)| entries.keys().map(move |name| (key, name))).collect();
    let Some(((arch, llvm), name)) = of_digests.symmetric_difference(&of_table).next() else { return Ok(()) };
    Err(Error::new(
        &RECORD_SPLIT,
        format!("{arch} {llvm}: the entry {name} is in one of PROVENANCE and {FILE_NAME} alone"),
    )
    .hint("run: cargo xtask ptx bless"))
}

/// What differs from the record, one phrase each. Usage is compared only with `same_ptxas`.
///
/// # Errors
/// [`NOT_RECORDED`]: nothing is recorded for a scan.
pub fn compare_with_record(
    scans: &[Scanning],
    recorded: &Digests,
    table: &Table,
    same_ptxas: bool,
) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for scan in scans {
        let key = (scan.arch.clone(), scan.llvm);
        let (Some(digests), Some(rows)) = (recorded.get(&key), table.rows.get(&key)) else {
            return Err(Error::new(
                &NOT_RECORDED,
                format!("PROVENANCE has no [kernels.ptx.{}.{}]", scan.arch, scan.llvm),
            )
            .hint(format!("run: cargo xtask ptx bless --arch {}", scan.arch)));
        };
        let digests = table::digest_differences(digests, &scan.digests());
        let rows = table::differences(rows, &scan.rows(), same_ptxas);
        found.extend(
            digests.into_iter().chain(rows).map(|line| format!("{} {}: {line}", scan.arch, scan.llvm)),
        );
    }
    Ok(found)
}

/// Whether registers, memory and spills of a build can be compared with the table's: they are the same ptxas's.
pub fn same_ptxas(plan: &Plan, table: &Table) -> bool {
    plan.ptxas.value.as_ref().map(|ptxas| &ptxas.full) == table.ptxas.as_ref()
}

/// Refuses differences from the record.
///
/// # Errors
/// [`DIFFERS`], with each as a cause.
pub fn refuse(differences: Vec<String>) -> Result<()> {
    if differences.is_empty() {
        return Ok(());
    }
    Err(differences
        .into_iter()
        .fold(
            Error::new(&DIFFERS, format!("the PTX is not what PROVENANCE and {FILE_NAME} say")),
            Error::cause,
        )
        .hint("if the change is meant, run: cargo xtask ptx bless"))
}

/// Builds with `plan` and compares with the record; the differences, one phrase each. With `seeded`, one recorded digest
/// is changed first, so that a difference must be found.
///
/// # Errors
/// Something fails, the sources are not the recorded ones, or nothing is recorded for one of `archs`.
pub fn compare_builds(
    workspace: &Path,
    plan: &Plan,
    archs: &[Arch],
    seeded: bool,
    env: &Env,
) -> Result<Vec<String>> {
    let pin = Pin::load(workspace)?;
    let mut recorded = record::digests(&pin);
    let table = Table::load(workspace)?.unwrap_or_default();
    record::check_sources(workspace, &pin)?;
    same_entries(&recorded, &table)?;
    if seeded {
        let digests = recorded.values_mut().flat_map(BTreeMap::values_mut);
        digests.for_each(|digest| *digest = Sha256::of(digest.as_bytes()));
    }
    let scans = build_and_scan(plan, &archs.iter().copied().collect(), None, env)?;
    compare_with_record(&scans, &recorded, &table, same_ptxas(plan, &table))
}
