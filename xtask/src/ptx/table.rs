//! The committed table of what every entry needs, `kernels/ptx-table.toml`, and the comparison with a scan.
//!
//! The digests of the same entries are in PROVENANCE; here is what a reader of a change wants to see: registers, memory,
//! spills, and how many instructions of which class. Comparison is exact and in both directions.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::usage::Usage;
use crate::base::hash::Sha256;
use crate::base::toml_context::excerpt;
use crate::pins::{ArchName, PtxCompiler};
use crate::report::error::{Error, Result};

crate::codes! {
    TABLE_MISSING = "KILN-0361", Machine, "there is no table of the kernels' PTX",
        "kernels/ptx-table.toml holds what every entry of the kernels needs on a GPU. It is part of the repository and \
         written by `cargo xtask ptx bless`.";
    TABLE_INVALID = "KILN-0362", Machine, "the table of the kernels' PTX is not valid",
        "kernels/ptx-table.toml is read strictly: an unknown key, a number that is none, or a spill without a dated \
         reason is an error. It is written by `cargo xtask ptx bless`; compare with `git diff kernels/ptx-table.toml`.";
}

/// Its place in the workspace.
pub const FILE_NAME: &str = "kernels/ptx-table.toml";

/// The layout that is written and read.
const SCHEMA: u32 = 1;

/// What is known of one entry, by architecture and compiler.
pub type Rows = BTreeMap<(ArchName, PtxCompiler), BTreeMap<String, Row>>;

/// The committed table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The ptxas that the numbers are of, such as `V13.0.88`.
    pub ptxas: Option<String>,
    /// All rows.
    pub rows: Rows,
}

/// One entry's row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// What ptxas says; `None` when no ptxas was there.
    pub usage: Option<Usage>,
    /// Bytes of local memory of a thread as the driver's own compiler says; `None` when it was not asked.
    pub local: Option<u32>,
    /// All instructions.
    pub instructions: usize,
    /// How many of each class.
    pub mix: BTreeMap<String, usize>,
    /// Why a nonzero value is accepted, with its date.
    pub reason: Option<Reason>,
}

/// `2026-07-04: a sentence`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(String);

impl Reason {
    /// A reason that was given on `date` (`YYYY-MM-DD`); `None` when it is empty.
    pub fn new(date: &str, text: &str) -> Option<Self> {
        Reason::parse(&format!("{date}: {}", text.trim()))
    }

    fn parse(text: &str) -> Option<Self> {
        let (date, why) = text.split_once(": ")?;
        let parts: Vec<&str> = date.split('-').collect();
        let digits =
            |part: &&str, length| part.len() == length && part.bytes().all(|byte| byte.is_ascii_digit());
        let dated =
            parts.len() == 3 && parts.iter().zip([4, 2, 2]).all(|(part, length)| digits(part, length));
        (dated && !why.trim().is_empty() && !why.contains('\n')).then(|| Reason(text.to_owned()))
    }

    /// The whole text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Row {
    /// What is not zero and should be: spills and local memory.
    pub fn nonzero(&self) -> Vec<String> {
        let usage = self.usage.unwrap_or_default();
        let values = [
            ("stack", usage.stack),
            ("spill-stores", usage.spill_stores),
            ("spill-loads", usage.spill_loads),
            ("local", self.local.unwrap_or(0)),
        ];
        let nonzero = values.into_iter().filter(|(_, value)| *value > 0);
        nonzero.map(|(name, value)| format!("{name} = {value}")).collect()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawTable {
    schema: u32,
    ptxas: Option<String>,
    #[serde(default)]
    entries: BTreeMap<ArchName, BTreeMap<PtxCompiler, BTreeMap<String, toml::Spanned<RawRow>>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawRow {
    registers: Option<u32>,
    shared: Option<u32>,
    stack: Option<u32>,
    spill_stores: Option<u32>,
    spill_loads: Option<u32>,
    local: Option<u32>,
    instructions: usize,
    mix: BTreeMap<String, usize>,
    reason: Option<String>,
}

impl RawRow {
    fn check(self) -> Result<Row, String> {
        let numbers = (self.registers, self.shared, self.stack, self.spill_stores, self.spill_loads);
        let usage = match numbers {
            (Some(registers), Some(shared), Some(stack), Some(spill_stores), Some(spill_loads)) => {
                Some(Usage { registers, shared, stack, spill_stores, spill_loads })
            }
            (None, None, None, None, None) => None,
            _ => {
                let all = "`registers`, `shared`, `stack`, `spill-stores` and `spill-loads`";
                return Err(format!("expected all of {all}, or none"));
            }
        };
        if self.mix.values().sum::<usize>() != self.instructions {
            return Err("`instructions` is not the sum of `mix`".to_owned());
        }
        let reason = match self.reason {
            Some(text) => Some(Reason::parse(&text).ok_or("`reason` must be `YYYY-MM-DD: why`, one line")?),
            None => None,
        };
        let row = Row { usage, local: self.local, instructions: self.instructions, mix: self.mix, reason };
        match (row.nonzero(), &row.reason) {
            (nonzero, None) if !nonzero.is_empty() => Err(format!("{} needs a `reason`", nonzero.join(", "))),
            (nonzero, Some(_)) if nonzero.is_empty() => {
                Err("a `reason`, but nothing to be explained".to_owned())
            }
            _ => Ok(row),
        }
    }
}

impl Table {
    /// The table's place in the workspace at `root`.
    pub fn path(root: &Path) -> PathBuf {
        root.join(FILE_NAME)
    }

    /// Reads the table; `None` when there is none.
    ///
    /// # Errors
    /// It cannot be read or is not valid ([`TABLE_INVALID`]).
    pub fn load(root: &Path) -> Result<Option<Self>> {
        let path = Table::path(root);
        let bytes = match fs_err::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let invalid = |message: String| {
            Error::new(&TABLE_INVALID, message)
                .hint(format!("restore it with `git checkout -- {FILE_NAME}`, or run: cargo xtask ptx bless"))
        };
        let text =
            str::from_utf8(&bytes).map_err(|_| invalid(format!("{} is not UTF-8 text", path.display())))?;
        let told = |span, message: &str| invalid(excerpt(&path, text, span, message));
        let raw: RawTable = toml::from_str(text)
            .map_err(|error| told(error.span().unwrap_or_default(), error.message().trim_end()))?;
        if raw.schema != SCHEMA {
            return Err(invalid(format!("{} has schema {}, expected {SCHEMA}", path.display(), raw.schema)));
        }
        let mut rows = Rows::new();
        for (arch, majors) in raw.entries {
            for (major, entries) in majors {
                for (name, row) in entries {
                    let span = row.span();
                    let row = row.into_inner().check().map_err(|message| told(span, &message))?;
                    rows.entry((arch.clone(), major)).or_default().insert(name, row);
                }
            }
        }
        Ok(Some(Table { ptxas: raw.ptxas, rows }))
    }

    /// The file's text: the same table always gives the same text.
    pub fn text(&self) -> String {
        let mut text = format!("{HEADER}schema = {SCHEMA}\n");
        if let Some(ptxas) = &self.ptxas {
            let _ = writeln!(text, "ptxas = {}", quoted(ptxas));
        }
        for ((arch, major), entries) in &self.rows {
            for (name, row) in entries {
                let _ = writeln!(text, "\n[entries.{arch}.{}.{}]", key(&major.to_string()), key(name));
                row.write(&mut text);
            }
        }
        text
    }
}

impl Row {
    fn write(&self, text: &mut String) {
        if let Some(usage) = self.usage {
            let Usage { registers, shared, stack, spill_stores, spill_loads } = usage;
            let _ = writeln!(
                text,
                "registers = {registers}\nshared = {shared}\nstack = {stack}\nspill-stores = \
                 {spill_stores}\nspill-loads = {spill_loads}"
            );
        }
        if let Some(local) = self.local {
            let _ = writeln!(text, "local = {local}");
        }
        let mix: Vec<String> =
            self.mix.iter().map(|(class, count)| format!("{} = {count}", key(class))).collect();
        let _ = writeln!(text, "instructions = {}\nmix = {{ {} }}", self.instructions, mix.join(", "));
        if let Some(reason) = &self.reason {
            let _ = writeln!(text, "reason = {}", quoted(reason.as_str()));
        }
    }
}

/// A TOML key, bare where it can be.
fn key(text: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if !text.is_empty() && text.chars().all(bare) { text.to_owned() } else { quoted(text) }
}

/// A TOML string.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

const HEADER: &str = "\
# What every entry of the kernels needs, by architecture and compiler. Written by `cargo xtask ptx bless`, compared
# exactly by `cargo xtask ptx check`; docs/ptx.md describes the columns. The digests are in PROVENANCE.
";

/// What differs between the table and a scan of one architecture and major, one phrase each. Columns that either side
/// does not have are not compared; `usage` says whether the two are of the same ptxas.
pub fn differences(table: &BTreeMap<String, Row>, scan: &BTreeMap<String, Row>, usage: bool) -> Vec<String> {
    let mut found = Vec::new();
    for name in names(table, scan) {
        let (row, is) = match (table.get(name), scan.get(name)) {
            (Some(row), Some(is)) => (row, is),
            (Some(_), None) => {
                found.push(format!("{name}: gone, the table has it"));
                continue;
            }
            (None, _) => {
                found.push(format!("{name}: new, the table does not have it"));
                continue;
            }
        };
        let mut compare = |what: &str, row: usize, is: usize| {
            if row != is {
                let direction = if is > row { "above" } else { "below" };
                found.push(format!("{name}: {what} {is}, {direction} the table's {row}"));
            }
        };
        if let (Some(row), Some(is), true) = (row.usage, is.usage, usage) {
            for (what, row, is) in [
                ("registers", row.registers, is.registers),
                ("shared", row.shared, is.shared),
                ("stack", row.stack, is.stack),
                ("spill-stores", row.spill_stores, is.spill_stores),
                ("spill-loads", row.spill_loads, is.spill_loads),
            ] {
                compare(what, row as usize, is as usize);
            }
        }
        if let (Some(row), Some(is)) = (row.local, is.local) {
            compare("local", row as usize, is as usize);
        }
        compare("instructions", row.instructions, is.instructions);
        let classes: BTreeSet<&String> = row.mix.keys().chain(is.mix.keys()).collect();
        for class in classes {
            let count = |row: &Row| row.mix.get(class).copied().unwrap_or(0);
            compare(class, count(row), count(is));
        }
    }
    found
}

/// What differs between the recorded digests and those of a scan, one phrase each.
pub fn digest_differences(
    recorded: &BTreeMap<String, Sha256>,
    scan: &BTreeMap<String, Sha256>,
) -> Vec<String> {
    names(recorded, scan)
        .into_iter()
        .filter_map(|name| match (recorded.get(name), scan.get(name)) {
            (Some(recorded), Some(is)) if recorded == is => None,
            (Some(recorded), Some(is)) => {
                Some(format!("{name}: the PTX is another one: digest {is}, PROVENANCE has {recorded}"))
            }
            (Some(_), None) => Some(format!("{name}: gone, PROVENANCE has its digest")),
            (None, _) => Some(format!("{name}: new, PROVENANCE has no digest of it")),
        })
        .collect()
}

fn names<'a, A, B>(one: &'a BTreeMap<String, A>, two: &'a BTreeMap<String, B>) -> BTreeSet<&'a String> {
    one.keys().chain(two.keys()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(registers: u32, spill: u32) -> Row {
        let usage = Usage { registers, spill_stores: spill, ..Usage::default() };
        let reason = (spill > 0).then(|| Reason::new("2026-11-30", "eight \"rows\" at once").unwrap());
        let mix = BTreeMap::from([("fma.rn.f32".to_owned(), 3), ("int".to_owned(), 4)]);
        Row { usage: Some(usage), local: None, instructions: 7, mix, reason }
    }

    fn table() -> Table {
        let key = ("sm_90".parse().unwrap(), "llvm-22".parse().unwrap());
        let entries = [("kiln_a".to_owned(), row(32, 0)), ("odd.name$".to_owned(), row(255, 8))];
        Table { ptxas: Some("V13.0.88".to_owned()), rows: [(key, entries.into())].into() }
    }

    fn load(text: &str) -> Result<Option<Table>> {
        let root = tempfile::tempdir().unwrap();
        fs_err::create_dir(root.path().join("kernels")).unwrap();
        fs_err::write(Table::path(root.path()), text).unwrap();
        Table::load(root.path()).map_err(|error| {
            let message = error.message().replace(&root.path().display().to_string(), "[root]");
            Error::new(error.code(), message)
        })
    }

    #[test]
    fn what_is_written_is_read() {
        let text = table().text();
        insta::assert_snapshot!(text, @r#"
        # What every entry of the kernels needs, by architecture and compiler. Written by `cargo xtask ptx bless`, compared
        # exactly by `cargo xtask ptx check`; docs/ptx.md describes the columns. The digests are in PROVENANCE.
        schema = 1
        ptxas = "V13.0.88"

        [entries.sm_90.llvm-22.kiln_a]
        registers = 32
        shared = 0
        stack = 0
        spill-stores = 0
        spill-loads = 0
        instructions = 7
        mix = { "fma.rn.f32" = 3, int = 4 }

        [entries.sm_90.llvm-22."odd.name$"]
        registers = 255
        shared = 0
        stack = 0
        spill-stores = 8
        spill-loads = 0
        instructions = 7
        mix = { "fma.rn.f32" = 3, int = 4 }
        reason = '2026-11-30: eight "rows" at once'
        "#);
        assert_eq!(load(&text).unwrap().unwrap(), table());
        let bare = Table::default();
        assert_eq!(load(&bare.text()).unwrap().unwrap(), bare);
        assert_eq!(Table::load(Path::new("/nowhere")).unwrap(), None);
    }

    #[test]
    fn the_table_is_read_strictly() {
        let text = table().text();
        let message = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            let error = load(&text.replace(from, to)).unwrap_err();
            assert_eq!(error.code().id, "KILN-0362");
            error.message().lines().next().unwrap().to_owned()
        };
        let at = |line: usize, rest: &str| format!("[root]/kernels/ptx-table.toml:{line}:1: {rest}");
        assert_eq!(
            message("schema = 1", "schema = 2"),
            "[root]/kernels/ptx-table.toml has schema 2, expected 1"
        );
        assert_eq!(
            message("reason = ", "why = ").split(": ").nth(1).unwrap(),
            "unknown field `why`, expected one of `registers`, `shared`, `stack`, `spill-stores`, `spill-loads`, `local`, `instructions`, `mix`, `reason`"
        );
        let line = text.lines().position(|line| line.contains("odd")).unwrap() + 1;
        assert_eq!(
            message("2026-11-30: ", "soon: "),
            at(line, "`reason` must be `YYYY-MM-DD: why`, one line")
        );
        assert_eq!(
            message("spill-stores = 8", "spill-stores = 0"),
            at(line, "a `reason`, but nothing to be explained")
        );
        assert_eq!(
            message("spill-stores = 0", "spill-stores = 4"),
            at(6, "spill-stores = 4 needs a `reason`")
        );
        assert_eq!(
            message("registers = 32\n", ""),
            at(
                6,
                "expected all of `registers`, `shared`, `stack`, `spill-stores` and `spill-loads`, or none"
            )
        );
        assert_eq!(message("int = 4", "int = 5"), at(6, "`instructions` is not the sum of `mix`"));
    }

    #[test]
    fn differences_are_found_in_both_directions() {
        let rows =
            |list: &[(&str, Row)]| list.iter().cloned().map(|(name, row)| (name.to_owned(), row)).collect();
        let committed: BTreeMap<_, _> = rows(&[("a", row(32, 0)), ("b", row(32, 0)), ("gone", row(1, 0))]);
        let mut b = row(40, 0);
        b.mix.insert("int".to_owned(), 5);
        b.instructions = 8;
        let scan = rows(&[("a", row(24, 8)), ("b", b), ("new", row(1, 0))]);
        assert_eq!(
            differences(&committed, &scan, true),
            [
                "a: registers 24, below the table's 32",
                "a: spill-stores 8, above the table's 0",
                "b: registers 40, above the table's 32",
                "b: instructions 8, above the table's 7",
                "b: int 5, above the table's 4",
                "gone: gone, the table has it",
                "new: new, the table does not have it",
            ]
        );
        assert_eq!(differences(&committed, &scan, false).len(), 4, "another ptxas gives other registers");
        assert!(differences(&committed, &committed, true).is_empty());
    }

    #[test]
    fn digests_are_compared_in_both_directions() {
        let digests = |list: &[(&str, &str)]| {
            list.iter().map(|(name, text)| ((*name).to_owned(), Sha256::of(text.as_bytes()))).collect()
        };
        let recorded = digests(&[("a", "x"), ("b", "x"), ("gone", "x")]);
        let found = digest_differences(&recorded, &digests(&[("a", "x"), ("b", "y"), ("new", "x")]));
        let starts: Vec<_> = found
            .iter()
            .map(|line| line.split(", ").next().unwrap().split(" digest").next().unwrap())
            .collect();
        assert_eq!(starts, ["b: the PTX is another one:", "gone: gone", "new: new"]);
    }
}
