//! `.cargo/cuda-oxide.toml`, the host config that cargo-oxide reads: written for this machine, and compared with
//! what it should be.
//!
//! The file is the user's, too. kiln owns `backend`, `extra-rustflags` and the `[env]` keys that it is given; any
//! other key, every comment, the order and the line endings stay as they are. Which flags are right is decided in
//! [`crate::machine::cargo_config`].

mod edit;

use self::edit::{is_marked, is_same, plain, plain_item, set, take_head};

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use toml_edit::{Array, Document, DocumentMut, Item, Table, TableLike, Value};

use crate::base::atomic::{through_links, write_atomic};
use crate::base::toml_context::excerpt;
use crate::codes;
use crate::machine::cargo_config::{HostFlags, Place};
use crate::report::error::{ACCESS, Error, Result};

codes! {
    HOST_CONFIG_INVALID = "KILN-0220", Refusal, ".cargo/cuda-oxide.toml is not valid",
        "cargo-oxide's config file is there and cannot be read as TOML in the layout that cargo-oxide expects. It \
         may hold keys of yours, so it is left as it is. Mend or remove it, then run `cargo xtask setup`.";
    HOST_CONFIG_DRIFT = "KILN-0221", Refusal, ".cargo/cuda-oxide.toml is not up to date",
        "cargo-oxide makes Cargo ignore every `rustflags` of its config files, so `setup` copies the flags that Cargo \
         would use into `.cargo/cuda-oxide.toml`. One of the two has changed since: a GPU build would use other host \
         flags, or another backend, than the CPU build. `cargo xtask setup` writes the file anew.";
    HOST_CONFIG_READ_ONLY = "KILN-0222", Machine, ".cargo/cuda-oxide.toml is read-only",
        "The file would have to be changed and its permissions say that nobody may. kiln does not work around that. \
         Make it writable, or put the shown values there yourself.";
    HOST_CONFIG_PATH = "KILN-0223", Machine, "a path cannot be written into .cargo/cuda-oxide.toml",
        "The host config is a TOML file, which is UTF-8, and cargo-oxide takes relative paths from `.cargo/`, not \
         from the project. So only absolute paths in UTF-8 are written. Choose another store with `--store DIR`.";
    HOST_CONFIG_LOST = "KILN-0224", Internal, ".cargo/cuda-oxide.toml did not keep what was written",
        "The file was written and read again, and holds something that no setup wrote. A program that rewrites the \
         file at the same time, or a faulty disk, does that.";
}

/// The file's path in the workspace whose commands read it.
pub const FILE_NAME: &str = ".cargo/cuda-oxide.toml";

/// What the host config must say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// The verified backend; absolute.
    pub backend: PathBuf,
    /// The flags that Cargo would use on this host, one argument each.
    pub extra_rustflags: Vec<String>,
    /// The host that they are for; shown in a comment.
    pub triple: String,
    /// Variables for cargo-oxide's children.
    pub env: BTreeMap<String, String>,
}

/// What [`write()`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Whether the file has another content now.
    pub changed: bool,
    /// What in the file has no effect or another one than it seems, one sentence each.
    pub warnings: Vec<String>,
}

/// One key that differs. Values are TOML text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    /// `backend`, `extra-rustflags` or `env.NAME`.
    pub key: String,
    /// What the file has; `None`: nothing.
    pub have: Option<String>,
    /// What it should have; `None`: nothing.
    pub want: Option<String>,
}

/// Makes the file at `path` say `config`, and keeps everything else in it. A symbolic link is written through. Two
/// writers at once both succeed, and the file is what one of them wrote.
///
/// # Errors
/// The file is not valid ([`HOST_CONFIG_INVALID`]; it is left alone), read-only ([`HOST_CONFIG_READ_ONLY`]) or
/// cannot be written, or a path does not fit ([`HOST_CONFIG_PATH`]).
pub fn write(path: &Path, config: &HostConfig) -> Result<Written> {
    let owned = config.owned()?;
    let real = through_links(path)?;
    let text = read(&real)?.unwrap_or_default();
    let before = Lines::split(&text);
    let mut document = parse(&real, &before.lf())?;
    let warnings = warnings(&document, &owned, &real);
    let drifts = drifts(&document, &owned);
    if drifts.is_empty() {
        return Ok(Written { changed: false, warnings });
    }
    for drift in &drifts {
        apply(&mut document, drift, &owned, &config.triple);
    }
    let after = before.join(&document.to_string());

    if fs_err::metadata(&real).is_ok_and(|metadata| metadata.permissions().readonly()) {
        let message = format!("{} is read-only and would have to change:{}", real.display(), listed(&drifts));
        return Err(Error::new(&HOST_CONFIG_READ_ONLY, message)
            .hint(format!("`chmod u+w '{}'`, then `cargo xtask setup`", real.display())));
    }
    if let Some(folder) = real.parent() {
        fs_err::create_dir_all(folder)?;
    }
    write_atomic(&real, after.as_bytes(), None).map_err(|error| {
        let is_access = error.code().id == ACCESS.id;
        if is_access {
            error.hint("make the folder writable; the file is replaced in one step")
        } else {
            error
        }
    })?;
    // Another content is fine when it is another setup's, which wrote between our renaming and our reading.
    let kept = read(&real)?.unwrap_or_default();
    let is_whole = kept == after
        || parse(&real, &Lines::split(&kept).lf()).is_ok_and(|document| document.contains_key(BACKEND));
    if !is_whole {
        let message = format!("{} was written and then read with another content", real.display());
        return Err(Error::new(&HOST_CONFIG_LOST, message).hint("run `cargo xtask setup` again"));
    }
    Ok(Written { changed: true, warnings })
}

/// The variables in the file's `[env]` table, which cargo-oxide gives to its children; none when there is no file.
///
/// # Errors
/// As [`compare`].
pub fn environment(path: &Path) -> Result<BTreeMap<String, String>> {
    let text = read(path)?.unwrap_or_default();
    let document = parse(path, &Lines::split(&text).lf())?;
    let table = document.get("env").and_then(|env| env.as_table_like());
    let pairs = table.into_iter().flat_map(|table| table.iter());
    Ok(pairs.filter_map(|(name, value)| Some((name.to_owned(), value.as_str()?.to_owned()))).collect())
}

/// The keys in which the file at `path` is not what `config` says; all of them when there is no file.
///
/// # Errors
/// The file is unreadable or not valid ([`HOST_CONFIG_INVALID`]).
pub fn compare(path: &Path, config: &HostConfig) -> Result<Vec<Drift>> {
    let owned = config.owned()?;
    let text = read(path)?.unwrap_or_default();
    Ok(drifts(&parse(path, &Lines::split(&text).lf())?, &owned))
}

/// The refusal for what [`compare`] found in the file at `path`. `flags` says where the host flags come from.
pub fn drift_error(path: &Path, drifts: &[Drift], flags: &HostFlags) -> Error {
    let mut message = format!("{} is not what this machine needs:", path.display());
    let file = path.file_name().unwrap_or_default().display();
    for Drift { key, have, want } in drifts {
        let have = have.as_deref().unwrap_or("nothing");
        let want = want.as_deref().unwrap_or("nothing");
        let _ = if key == EXTRA_RUSTFLAGS {
            write!(message, "\n  {key}: {} has {want}, {file} has {have}", flag_source(flags))
        } else {
            write!(message, "\n  {key}: setup writes {want}, {file} has {have}")
        };
    }
    let error = Error::new(&HOST_CONFIG_DRIFT, message).hint("run `cargo xtask setup`");
    if !drifts.iter().any(|drift| drift.key == EXTRA_RUSTFLAGS) {
        return error;
    }
    let places = flags.origin.iter().map(|origin| format!("{:?} from {origin}", origin.flags));
    places.fold(error, Error::cause)
}

const BACKEND: &str = "backend";
const EXTRA_RUSTFLAGS: &str = "extra-rustflags";
const ENV: &str = "env";

/// What cargo-oxide knows at the top of the file.
const KNOWN: &[&str] = &[BACKEND, "default-arch", EXTRA_RUSTFLAGS, ENV];

/// How the comment begins above a key that kiln wrote; such an `[env]` key goes when it is no longer needed.
const MARK: &str = "# kiln:";

const HEADER: &str = "# cargo-oxide reads this file. `cargo xtask setup` keeps the keys below a `kiln:` comment up to \
                      date;\n# everything else is yours.\n\n";

/// The values that kiln owns, checked.
struct Owned {
    backend: String,
    extra_rustflags: Vec<String>,
    env: BTreeMap<String, String>,
}

impl HostConfig {
    fn owned(&self) -> Result<Owned> {
        let backend = self.backend.to_str().filter(|_| self.backend.is_absolute()).ok_or_else(|| {
            let message =
                format!("the backend's path is {:?}, expected an absolute path in UTF-8", self.backend);
            Error::new(&HOST_CONFIG_PATH, message).hint("choose another store with `--store DIR`")
        })?;
        Ok(Owned {
            backend: backend.to_owned(),
            extra_rustflags: self.extra_rustflags.clone(),
            env: self.env.clone(),
        })
    }
}

impl Owned {
    fn value(&self, key: &str) -> Option<Value> {
        match key {
            BACKEND => Some(self.backend.as_str().into()),
            EXTRA_RUSTFLAGS => Some(Value::Array(self.extra_rustflags.iter().collect::<Array>())),
            _ => self.env.get(key.strip_prefix("env.")?).map(|value| value.as_str().into()),
        }
    }
}

fn read(path: &Path) -> Result<Option<String>> {
    let invalid = |what: &str| {
        let message = format!("{} is {what}, expected a TOML file", path.display());
        Error::new(&HOST_CONFIG_INVALID, message).hint("mend or remove it, then run `cargo xtask setup`")
    };
    match fs_err::read(path) {
        Ok(bytes) => String::from_utf8(bytes).map(Some).map_err(|_| invalid("not UTF-8 text")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => Err(invalid("a folder")),
        Err(error) => Err(error.into()),
    }
}

fn parse(path: &Path, text: &str) -> Result<DocumentMut> {
    let invalid = |span: Option<std::ops::Range<usize>>, message: &str| {
        Error::new(&HOST_CONFIG_INVALID, excerpt(path, text, span.unwrap_or_default(), message))
            .hint("mend or remove it, then run `cargo xtask setup`; it was left as it is")
    };
    let document =
        Document::parse(text).map_err(|error| invalid(error.span(), error.message().trim_end()))?;
    if let Some(env) = document.get(ENV)
        && env.as_table_like().is_none()
    {
        return Err(invalid(env.span(), "`env` must be a table of strings"));
    }
    Ok(document.into_mut())
}

/// The differences between the document and what kiln owns, in the file's usual order.
fn drifts(document: &DocumentMut, owned: &Owned) -> Vec<Drift> {
    let env = document.get(ENV).and_then(Item::as_table_like);
    let mut keys = vec![BACKEND.to_owned(), EXTRA_RUSTFLAGS.to_owned()];
    keys.extend(owned.env.keys().map(|name| format!("env.{name}")));
    let left_over = env
        .into_iter()
        .flat_map(TableLike::iter)
        .map(|(name, _)| name)
        .filter(|name| !owned.env.contains_key(*name) && env.is_some_and(|env| is_marked(env, name)));
    keys.extend(left_over.map(|name| format!("env.{name}")));

    let mut drifts = Vec::new();
    for key in keys {
        let present = match key.strip_prefix("env.") {
            Some(name) => env.and_then(|env| env.get(name)),
            None => document.get(&key),
        };
        let want = owned.value(&key);
        let is_equal = match (present.and_then(Item::as_value), &want) {
            (Some(present), Some(want)) => is_same(present, want),
            _ => present.is_none() && want.is_none(),
        };
        if !is_equal {
            let have = present.map(plain_item);
            drifts.push(Drift { key, have, want: want.as_ref().map(plain) });
        }
    }
    drifts
}

fn apply(document: &mut DocumentMut, drift: &Drift, owned: &Owned, triple: &str) {
    let key = drift.key.as_str();
    let comment = match key {
        BACKEND => format!("{MARK} the verified backend\n"),
        EXTRA_RUSTFLAGS => format!("{MARK} the flags that Cargo itself would use for {triple}\n"),
        _ => format!("{MARK} set for every build\n"),
    };
    let Some(name) = key.strip_prefix("env.") else {
        let head = if document.contains_key(key) { String::new() } else { take_head(document) };
        set(document.as_table_mut(), key, owned.value(key), &format!("{head}{comment}"));
        return;
    };
    if !document.contains_key(ENV) {
        let mut table = Table::new();
        table.decor_mut().set_prefix("\n");
        document.insert(ENV, Item::Table(table));
    }
    let Some(env) = document.get_mut(ENV) else { return };
    let has_own_lines = env.as_table().is_some_and(|env| !env.is_dotted());
    if let Some(env) = env.as_table_like_mut() {
        set(env, name, owned.value(key), if has_own_lines { &comment } else { "" });
    }
}

fn listed(drifts: &[Drift]) -> String {
    let line =
        |drift: &Drift| format!("\n  {} = {}", drift.key, drift.want.as_deref().unwrap_or("(removed)"));
    drifts.iter().map(line).collect()
}

/// What of the user's own keys cargo-oxide ignores or refuses.
fn warnings(document: &DocumentMut, owned: &Owned, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut warn = |text: String| warnings.push(format!("{}: {text}", path.display()));
    for (key, item) in document.iter() {
        if !KNOWN.contains(&key) {
            let meant = KNOWN.iter().find(|known| **known == key.to_lowercase().replace('_', "-"));
            let hint = meant.map(|known| format!("; did you mean `{known}`?")).unwrap_or_default();
            warn(format!("cargo-oxide does not know the key `{key}`{hint}"));
        }
        if key == "default-arch" && !item.is_str() {
            warn("cargo-oxide refuses a `default-arch` that is not a string".to_owned());
        }
        if key == EXTRA_RUSTFLAGS && !item.is_array() {
            warn(format!("`{key}` was {}, which cargo-oxide refuses; it is an array now", plain_item(item)));
        }
        if key == BACKEND && item.as_str().is_some_and(|backend| Path::new(backend).is_relative()) {
            warn(format!("`{key}` was relative, which cargo-oxide takes from `.cargo/`; it is absolute now"));
        }
    }
    for (name, item) in document.get(ENV).and_then(Item::as_table_like).into_iter().flat_map(TableLike::iter)
    {
        if matches!(name, "RUSTFLAGS" | "CARGO_ENCODED_RUSTFLAGS") {
            warn(format!("cargo-oxide ignores `{name}` in `[env]`; put flags into Cargo's config"));
        } else if !item.is_str() {
            warn(format!("cargo-oxide refuses `{name}` in `[env]`, because it is not a string"));
        } else if name.starts_with("CUDA_OXIDE_") && !owned.env.contains_key(name) {
            warn(format!("`{name}` in `[env]` changes what cargo-oxide does and is not kiln's"));
        }
    }
    warnings
}

fn flag_source(flags: &HostFlags) -> String {
    let mut names: Vec<&str> = Vec::new();
    for origin in &flags.origin {
        let name = match &origin.place {
            Place::File(_) => "config.toml",
            Place::Variable(name) => name,
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.is_empty() { "config.toml".to_owned() } else { names.join(" and ") }
}

/// A text taken apart into lines and their endings, so that an edit changes the endings of no other line.
struct Lines<'a> {
    has_mark: bool,
    lines: Vec<(&'a str, &'a str)>,
}

impl<'a> Lines<'a> {
    fn split(text: &'a str) -> Self {
        let body = text.strip_prefix('\u{feff}');
        let has_mark = body.is_some();
        let lines = body.unwrap_or(text).split_inclusive('\n').map(|line| {
            let content = line.strip_suffix("\r\n").or_else(|| line.strip_suffix('\n')).unwrap_or(line);
            (content, &line[content.len()..])
        });
        Lines { has_mark, lines: lines.collect() }
    }

    /// The text with `\n` alone, without a byte order mark.
    fn lf(&self) -> String {
        let line = |(content, ending): &(&str, &str)| {
            format!("{content}{}", if ending.is_empty() { "" } else { "\n" })
        };
        self.lines.iter().map(line).collect()
    }

    /// `edited` with the endings of the lines that it still has, and the most common one for the others.
    fn join(&self, edited: &str) -> String {
        let crlf = self.lines.iter().filter(|(_, ending)| *ending == "\r\n").count();
        let common = if crlf * 2 > self.lines.len() { "\r\n" } else { "\n" };
        let mut joined = String::from(if self.has_mark { "\u{feff}" } else { "" });
        let mut rest = self.lines.as_slice();
        for line in edited.split_inclusive('\n') {
            let content = line.strip_suffix('\n').unwrap_or(line);
            let at = rest.iter().position(|(old, _)| *old == content);
            let ending = at.map_or(common, |at| rest[at].1);
            rest = at.map_or(rest, |at| &rest[at + 1..]);
            joined.push_str(content);
            if content.len() < line.len() {
                joined.push_str(if ending.is_empty() { common } else { ending });
            }
        }
        joined
    }
}

#[cfg(test)]
mod tests;
