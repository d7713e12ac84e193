//! What PROVENANCE records of the kernels: the hash of their sources, and every entry's digest.

use std::collections::BTreeMap;
use std::path::Path;

use fs_err as fs;
use toml_edit::{DocumentMut, Item, Table, value};

use crate::base::atomic::write_atomic;
use crate::base::hash::Sha256;
use crate::pins::{self, ArchName, Pin, PtxCompiler};
use crate::report::error::{Error, Result};

crate::codes! {
    STALE = "KILN-0356", Refusal, "the kernels' sources are not those of the record",
        "PROVENANCE records the hash of the sources for which its digests of PTX hold. The sources have another one: \
         they were changed since. Once the new PTX is what it should be (the gates say so), record it with \
         `cargo xtask ptx bless`.";
    NOT_RECORDED = "KILN-0357", Machine, "PROVENANCE records no PTX for this",
        "`ptx check` compares with the digests in PROVENANCE, [kernels.ptx.ARCH.llvm-MAJOR] or [kernels.ptx.ARCH.\"libnvvm-RELEASE\"], \
         and there are none for this architecture and compiler.";
    CANNOT_RECORD = "KILN-0358", Machine, "PROVENANCE cannot be changed",
        "`ptx bless` changes [kernels] in PROVENANCE and keeps everything else as it is. The file has a form in which \
         that is not possible.";
}

/// The digests of entries, by architecture and compiler, as PROVENANCE has them.
pub type Digests = BTreeMap<(ArchName, PtxCompiler), BTreeMap<String, Sha256>>;

/// The digests that `pin` has.
pub fn digests(pin: &Pin) -> Digests {
    let mut digests = Digests::new();
    for (arch, majors) in &pin.kernels.ptx {
        for (major, entries) in majors {
            digests.insert((arch.clone(), *major), entries.clone());
        }
    }
    digests
}

/// The hash of everything below kernels/ that a compiler reads: Rust files, manifests and lock files, by path and bytes.
///
/// # Errors
/// A file cannot be read, or a path is not UTF-8.
pub fn source_hash(workspace: &Path) -> Result<Sha256> {
    let mut lines = Vec::new();
    let mut folders = vec![workspace.join("kernels")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            let kind = entry.file_type()?;
            // Links are setup's, folders called target are Cargo's.
            if kind.is_dir() && name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                folders.push(path);
            } else if kind.is_file() && is_source(&path) {
                let relative = path.strip_prefix(workspace).unwrap_or(&path);
                let relative: Vec<_> =
                    relative.components().map(|part| part.as_os_str().to_string_lossy()).collect();
                lines.push(format!("{}  {}\n", relative.join("/"), Sha256::of(&fs::read(&path)?)));
            }
        }
    }
    lines.sort();
    Ok(Sha256::of(lines.concat().as_bytes()))
}

fn is_source(path: &Path) -> bool {
    let end = path.extension().and_then(|end| end.to_str());
    matches!(end, Some("rs" | "lock" | "toml")) && !path.ends_with(super::table::FILE_NAME)
}

/// Compares the kernels' sources with the record.
///
/// # Errors
/// They differ ([`STALE`]), or nothing is recorded ([`NOT_RECORDED`]).
pub fn check_sources(workspace: &Path, pin: &Pin) -> Result<()> {
    let hint = "run: cargo xtask ptx bless";
    let found = source_hash(workspace)?;
    match pin.kernels.source_sha256 {
        Some(recorded) if recorded == found => Ok(()),
        Some(recorded) => Err(Error::new(
            &STALE,
            format!("the sources below kernels/ were changed\n  recorded: {recorded}\n  found:    {found}"),
        )
        .hint(hint)),
        None => Err(Error::new(&NOT_RECORDED, "PROVENANCE has no [kernels] source-sha256").hint(hint)),
    }
}

/// Writes `source` and `digests` into PROVENANCE, in place of all that it had of both; comments and everything else stay.
/// Says whether anything changed.
///
/// # Errors
/// The file cannot be read, changed ([`CANNOT_RECORD`]) or written.
pub fn write(workspace: &Path, source: &Sha256, digests: &Digests) -> Result<bool> {
    let path = workspace.join(pins::FILE_NAME);
    let before = fs::read_to_string(&path)?;
    let refuse = |what: String| {
        Error::new(&CANNOT_RECORD, format!("{}: {what}", path.display()))
            .hint("restore its form: git diff PROVENANCE")
    };
    let mut document: DocumentMut = before.parse().map_err(|error| refuse(format!("{error}")))?;
    let kernels = document
        .get_mut("kernels")
        .and_then(Item::as_table_mut)
        .ok_or_else(|| refuse("[kernels] is not a table of its own".to_owned()))?;
    kernels.insert("source-sha256", value(source.to_string()));
    kernels.remove("ptx");
    let mut archs = Table::new();
    archs.set_implicit(true);
    for ((arch, major), entries) in digests {
        let majors = archs.entry(arch.as_str()).or_insert_with(|| {
            let mut table = Table::new();
            table.set_implicit(true);
            Item::Table(table)
        });
        let mut table = Table::new();
        for (name, digest) in entries {
            table.insert(name, value(digest.to_string()));
        }
        if let Some(majors) = majors.as_table_mut() {
            majors.insert(&major.to_string(), Item::Table(table));
        }
    }
    if !archs.is_empty() {
        kernels.insert("ptx", Item::Table(archs));
    }
    let after = document.to_string();
    // What was written must be what is read.
    Pin::parse(&path, &after)?;
    if after == before {
        return Ok(false);
    }
    write_atomic(&path, after.as_bytes(), None)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIN: &str = include_str!("../../../PROVENANCE");

    fn world() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("kernels/device/src")).unwrap();
        fs::write(root.path().join("kernels/Cargo.toml"), "x").unwrap();
        fs::write(root.path().join("kernels/device/src/main.rs"), "fn main() {}").unwrap();
        let (head, _) = PIN.split_once("[kernels]").unwrap();
        fs::write(root.path().join("PROVENANCE"), format!("{head}[kernels]\n# Why.\ncontraction = false\n"))
            .unwrap();
        root
    }

    #[test]
    fn the_hash_is_of_sources_alone() {
        let root = world();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let before = source_hash(root.path()).unwrap();
        for name in [
            "target/a.rs",
            "device/target/b.rs",
            ".git/c.rs",
            "ptx-table.toml",
            "device/kiln.ptx",
            "device/k.ll",
        ] {
            write(&format!("kernels/{name}"), "x");
            assert_eq!(source_hash(root.path()).unwrap(), before, "{name}");
        }
        write("kernels/device/Cargo.lock", "x");
        let with_lock = source_hash(root.path()).unwrap();
        assert_ne!(with_lock, before);
        write("kernels/device/src/main.rs", "fn main() { }");
        assert_ne!(source_hash(root.path()).unwrap(), with_lock);
    }

    #[test]
    fn what_is_recorded_is_read_and_the_rest_stays() {
        let root = world();
        let load = || Pin::load(root.path()).unwrap();
        assert_eq!(check_sources(root.path(), &load()).unwrap_err().code().id, "KILN-0357");
        let key = |arch: &str, major: &str| (arch.parse().unwrap(), major.parse().unwrap());
        let entries = |names: &[&str]| {
            names.iter().map(|name| ((*name).to_owned(), Sha256::of(name.as_bytes()))).collect()
        };
        let source = source_hash(root.path()).unwrap();
        let mut wanted: Digests = [
            (key("sm_90", "llvm-22"), entries(&["b", "a.odd$name"])),
            (key("sm_90", "llvm-23"), entries(&["b"])),
            (key("sm_86", "llvm-22"), entries(&["b"])),
        ]
        .into();
        assert!(write(root.path(), &source, &wanted).unwrap());
        assert_eq!(digests(&load()), wanted);
        check_sources(root.path(), &load()).unwrap();
        assert!(!write(root.path(), &source, &wanted).unwrap(), "nothing is written twice");
        let text = fs::read_to_string(root.path().join("PROVENANCE")).unwrap();
        let (head, tail) = text.split_once("[kernels]").unwrap();
        assert_eq!(head, PIN.split_once("[kernels]").unwrap().0);
        let tail: Vec<_> = tail.lines().map(|line| line.split(" = ").next().unwrap()).collect();
        assert_eq!(
            tail,
            [
                "",
                "# Why.",
                "contraction",
                "source-sha256",
                "",
                "[kernels.ptx.sm_86.llvm-22]",
                "b",
                "",
                "[kernels.ptx.sm_90.llvm-22]",
                "\"a.odd$name\"",
                "b",
                "",
                "[kernels.ptx.sm_90.llvm-23]",
                "b"
            ]
        );

        wanted.remove(&key("sm_86", "llvm-22"));
        assert!(write(root.path(), &source, &wanted).unwrap());
        assert_eq!(digests(&load()), wanted);
        fs::write(root.path().join("kernels/Cargo.toml"), "y").unwrap();
        let error = check_sources(root.path(), &load()).unwrap_err();
        assert_eq!((error.code().id, error.exit().status()), ("KILN-0356", 70));
    }
}
