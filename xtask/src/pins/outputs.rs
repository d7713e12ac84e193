//! `[[output]]`: what a build of the pinned inputs must give. The expected outcome is pinned, not only the input.

use std::path::Path;

use fs_err as fs;
use serde::Deserialize;
use toml_edit::{ArrayOfTables, DocumentMut, Item, Table, Value};

use super::{FILE_NAME, PIN_INVALID, Pin};
use crate::base::atomic::write_atomic;
use crate::base::hash::Sha256;
use crate::report::error::{Error, Result};

/// The digests of a backend and cargo-oxide, for the inputs that a key stands for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Output {
    /// The host triple.
    pub host: String,
    /// The commit of the rustc that builds it.
    pub rustc: String,
    /// The key of the backend: source, patches, lock file, the whole `rustc -vV` and the recipe.
    pub key: String,
    /// Of the backend's library.
    pub backend_sha256: Sha256,
    /// Of cargo-oxide.
    pub cargo_oxide_sha256: Sha256,
}

/// How an output stands to the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recorded<'a> {
    /// It is the recorded one.
    Same,
    /// Nothing is recorded for its inputs.
    Nothing,
    /// Another one is recorded.
    Other(&'a Output),
}

impl Pin {
    /// Compares what was built with what is recorded for the same inputs. There may be several records of one key, where
    /// builders differ in what the key cannot hold.
    pub fn recorded(&self, built: &Output) -> Recorded<'_> {
        let mut of_key = self.outputs.iter().filter(|output| output.key == built.key).peekable();
        let Some(first) = of_key.peek().copied() else { return Recorded::Nothing };
        let same = |output: &Output| {
            output.backend_sha256 == built.backend_sha256
                && output.cargo_oxide_sha256 == built.cargo_oxide_sha256
        };
        if of_key.any(same) { Recorded::Same } else { Recorded::Other(first) }
    }
}

/// Writes `output` into PROVENANCE, beside those that are there; those of the same host and rustc, but of other
/// inputs, go: they are of an earlier state of PROVENANCE. Comments and order are kept.
///
/// # Errors
/// PROVENANCE cannot be read or edited.
pub fn record(workspace: &Path, output: &Output) -> Result<()> {
    let path = workspace.join(FILE_NAME);
    let text = fs::read_to_string(&path)?;
    let malformed = |cause: String| {
        Error::new(&PIN_INVALID, format!("{} cannot be edited", path.display()))
            .cause(cause)
            .hint("compare with `git diff PROVENANCE`")
    };
    let mut document: DocumentMut =
        text.parse().map_err(|error: toml_edit::TomlError| malformed(error.to_string()))?;
    let item = document.entry("output").or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
    let tables =
        item.as_array_of_tables_mut().ok_or_else(|| malformed("output is no list of tables".into()))?;
    let is = |table: &Table, key: &str, value: &str| table.get(key).and_then(Item::as_str) == Some(value);
    tables.retain(|table| {
        !is(table, "host", &output.host)
            || !is(table, "rustc", &output.rustc)
            || is(table, "key", &output.key)
    });
    let mut table = Table::new();
    for (key, value) in [
        ("host", output.host.clone()),
        ("rustc", output.rustc.clone()),
        ("key", output.key.clone()),
        ("backend-sha256", output.backend_sha256.to_string()),
        ("cargo-oxide-sha256", output.cargo_oxide_sha256.to_string()),
    ] {
        table.insert(key, Item::Value(Value::from(value)));
    }
    table.decor_mut().set_prefix(if tables.is_empty() {
        "\n# What a build of these inputs must give, by host and rustc; `setup` refuses anything else. Recorded by\n\
         # `cargo xtask setup --accept`.\n"
    } else {
        "\n"
    });
    tables.push(table);
    let edited = document.to_string();
    Pin::parse(&path, &edited)?;
    write_atomic(&path, edited.as_bytes(), None)
}
