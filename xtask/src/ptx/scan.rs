//! Scanning PTX files: every entry's digest, instructions and usage. All of them, or an error: never a part.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::driver::Card;
use super::listing::{Entry, Listing};
use super::table::Row;
use super::{Ptx, usage};
use crate::base::env::Env;
use crate::base::hash::Sha256;
use crate::machine::arch::Arch;
use crate::machine::cuda::Ptxas;
use crate::report::error::{Error, Result};

crate::codes! {
    NO_PTX_THERE = "KILN-0353", Machine, "there is no PTX to read",
        "A PTX file, a folder with .ptx files, or a folder of a build (target/device/ARCH) was expected.";
    AMBIGUOUS = "KILN-0354", Machine, "the folder holds the PTX of several builds",
        "A build's folder keeps the PTX of each combination of llc and backend apart, in ptx-KEY. Name one of them; \
         `cargo xtask build --arch ARCH` prints the one that it made.";
    TWICE = "KILN-0355", Refusal, "two entries have the same name",
        "Entries are told apart by their names, in PROVENANCE as in the binary. Give every entry a name of its own.";
}

/// An entry as it was scanned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scanned {
    /// Of the canonical text.
    pub digest: Sha256,
    /// What it needs.
    pub row: Row,
}

/// Reads the entries of all `files` together.
///
/// # Errors
/// A file cannot be read, has no entry, or an entry is there twice ([`NO_PTX_THERE`], [`TWICE`]).
pub fn read(files: &[PathBuf]) -> Result<BTreeMap<String, Entry>> {
    let mut entries = BTreeMap::new();
    for path in files {
        let listing = Listing::parse(&text_of(path)?);
        let mut twice = listing.duplicates.iter().next().cloned();
        if listing.entries.is_empty() {
            return Err(Error::new(&NO_PTX_THERE, format!("{} has no `.entry`", path.display()))
                .hint("name a PTX file that a build wrote"));
        }
        for (name, entry) in listing.entries {
            if entries.insert(name.clone(), entry).is_some() {
                twice.get_or_insert(name);
            }
        }
        if let Some(name) = twice {
            return Err(Error::new(
                &TWICE,
                format!("the entry {name} is there twice, again in {}", path.display()),
            )
            .hint("rename one of them"));
        }
    }
    Ok(entries)
}

/// Scans all `files` together; with `ptxas`, also what each entry needs, and with a card of their architecture what the
/// driver gives it.
///
/// # Errors
/// As [`read`], and ptxas or the driver fails.
pub fn scan(
    files: &[PathBuf],
    ptxas: Option<&Ptxas>,
    card: Option<&Card>,
    env: &Env,
) -> Result<BTreeMap<String, Scanned>> {
    let mut usages = BTreeMap::new();
    let mut locals = BTreeMap::new();
    for path in files {
        let text = text_of(path)?;
        let ptx = Ptx::parse(&text);
        // For another card than the architecture's own the number would be of other code.
        let own = ptx.target.as_deref().and_then(|target| target.parse::<Arch>().ok()).map(Arch::capability);
        if let Some(card) = card.filter(|card| own == Some(card.capability)) {
            let entries = ptx.entries.iter().map(String::as_str);
            let found = card.local_bytes(&text, entries);
            locals.extend(found.map_err(|error| error.context(path.display().to_string()))?);
        }
    }
    if let Some(ptxas) = ptxas {
        for path in files {
            let ptx = Ptx::parse(&text_of(path)?);
            let target = ptx.target.unwrap_or_default();
            usages.extend(usage::assemble(
                ptxas,
                path,
                &target,
                ptx.entries.iter().map(String::as_str),
                env,
            )?);
        }
    }
    let scanned = read(files)?.into_iter().map(|(name, entry)| {
        let row = Row {
            usage: usages.get(&name).copied(),
            local: locals.get(&name).copied(),
            instructions: entry.instructions.len(),
            mix: entry.mix(),
            reason: None,
        };
        (name, Scanned { digest: entry.digest(), row })
    });
    Ok(scanned.collect())
}

/// The PTX files that `path` means: itself, those in it, or those of the one build in it.
///
/// # Errors
/// There are none, or of several builds.
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let none = |what: &str| {
        Error::new(&NO_PTX_THERE, format!("{} {what}", path.display()))
            .hint("name a .ptx file, a folder of them, or a build such as target/device/sm_90")
    };
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    if !path.is_dir() {
        return Err(none("does not exist"));
    }
    let own = in_folder(path)?;
    if !own.is_empty() {
        return Ok(own);
    }
    let mut builds = Vec::new();
    for entry in fs::read_dir(path)? {
        let folder = entry?.path();
        let is_build = folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ptx-"));
        if is_build && folder.is_dir() && !in_folder(&folder)?.is_empty() {
            builds.push(folder);
        }
    }
    builds.sort();
    match &builds[..] {
        [] => Err(none("holds no .ptx file")),
        [one] => in_folder(one),
        several => {
            let names: Vec<_> = several.iter().map(|folder| folder.display().to_string()).collect();
            Err(Error::new(&AMBIGUOUS, format!("{} holds {} builds", path.display(), several.len()))
                .hint(format!("name one of them: {}", names.join(", "))))
        }
    }
}

/// The .ptx files in `folder`, by name.
///
/// # Errors
/// The folder cannot be read.
pub fn in_folder(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "ptx") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn text_of(path: &Path) -> Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const REAL: &str = include_str!("../../tests/fixtures/ptx/dot_product_sm_90_llc22.ptx");

    #[test]
    fn a_build_is_found_in_its_folder_and_two_are_ambiguous() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        assert_eq!(files(&at("none")).unwrap_err().code().id, "KILN-0353");
        assert_eq!(files(root.path()).unwrap_err().code().id, "KILN-0353");
        fs::create_dir_all(at("ptx-a")).unwrap();
        fs::create_dir_all(at("ptx-empty")).unwrap();
        fs::write(at("ptx-a/k.ptx"), REAL).unwrap();
        fs::write(at("ptx-a/k.ll"), "").unwrap();
        for named in [root.path(), &at("ptx-a"), &at("ptx-a/k.ptx")] {
            assert_eq!(files(named).unwrap(), [at("ptx-a/k.ptx")]);
        }
        fs::create_dir_all(at("ptx-b")).unwrap();
        fs::write(at("ptx-b/k.ptx"), REAL).unwrap();
        let error = files(root.path()).unwrap_err();
        assert_eq!(error.code().id, "KILN-0354");
        assert!(error.hint_text().unwrap().contains("ptx-a, "), "{error}");

        let both = [at("ptx-a/k.ptx"), at("ptx-b/k.ptx")];
        let error = scan(&both, None, None, &Env::default()).unwrap_err();
        assert_eq!((error.code().id, error.exit().status()), ("KILN-0355", 70));
        fs::write(at("ptx-b/k.ptx"), "not PTX").unwrap();
        assert_eq!(scan(&both, None, None, &Env::default()).unwrap_err().code().id, "KILN-0353");
        let scanned = scan(&both[..1], None, None, &Env::default()).unwrap();
        assert_eq!(scanned["k"].row.usage, None);
    }
}
