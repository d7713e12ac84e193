//! `.cargo/cuda-oxide.toml`, the host config that cargo-oxide reads: written for this machine, and compared with
//! what it should be.
//!
//! The file is the user's, too. kiln owns `backend`, `extra-rustflags` and the `[env]` keys that it is given; any
//! other key, every comment, the order and the line endings stay as they are. Which flags are right is decided in
//! [`crate::machine::cargo_config`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use toml_edit::{Array, Decor, Document, DocumentMut, Item, Table, TableLike, Value};

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

/// Takes the text that must stay at the top of the file when its first key is put there.
fn take_head(document: &mut DocumentMut) -> String {
    if document.is_empty() {
        let text = document.trailing().as_str().unwrap_or_default().to_owned();
        document.set_trailing("");
        return if text.trim().is_empty() { HEADER.to_owned() } else { format!("{text}\n") };
    }
    let first = document.iter_mut().map(|(_, item)| item).next();
    // A key on top keeps its comment. Of a table's, what a blank line sets apart is the file's.
    let Some(Item::Table(first)) = first else { return String::new() };
    let text = text_of(first.decor());
    let (head, own) = match text.rfind("\n\n") {
        Some(at) => text.split_at(at + 2),
        None => ("", text.as_str()),
    };
    let (head, own) = (head.to_owned(), format!("\n{}", own.trim_start_matches('\n')));
    first.decor_mut().set_prefix(own);
    head
}

/// Sets or removes one key; a present key keeps its place and the comments around it.
fn set(table: &mut dyn TableLike, key: &str, value: Option<Value>, comment: &str) {
    let Some(mut value) = value else {
        table.remove(key);
        return;
    };
    let mut prefix = comment.to_owned();
    match table.get_mut(key) {
        Some(present) => {
            if let Some(present) = present.as_value() {
                *value.decor_mut() = present.decor().clone();
            }
            *present = Item::Value(value);
            // kiln's own comment is renewed, because it names the host; a removed one stays removed.
            prefix = table.key(key).map(|key| text_of(key.leaf_decor())).unwrap_or_default();
            if let Some(start) = prefix.rfind(MARK) {
                let end = prefix[start..].find('\n').map_or(prefix.len(), |end| start + end + 1);
                prefix.replace_range(start..end, comment);
            }
        }
        None => {
            table.insert(key, Item::Value(value));
        }
    }
    if let Some(mut key) = table.key_mut(key)
        && !prefix.is_empty()
    {
        key.leaf_decor_mut().set_prefix(prefix);
    }
}

fn is_marked(table: &dyn TableLike, key: &str) -> bool {
    table.key(key).is_some_and(|key| text_of(key.leaf_decor()).contains(MARK))
}

fn text_of(decor: &Decor) -> String {
    decor.prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default().to_owned()
}

fn is_same(present: &Value, want: &Value) -> bool {
    match (present, want) {
        (Value::String(present), Value::String(want)) => present.value() == want.value(),
        (Value::Array(present), Value::Array(want)) => {
            present.len() == want.len()
                && present.iter().zip(want).all(|(present, want)| is_same(present, want))
        }
        _ => false,
    }
}

/// The value alone on one line.
fn plain(value: &Value) -> String {
    match value {
        Value::Array(array) => {
            let elements: Vec<_> = array.iter().map(plain).collect();
            format!("[{}]", elements.join(", "))
        }
        Value::String(text) => Value::from(text.value().as_str()).to_string(),
        other => other.clone().decorated("", "").to_string(),
    }
}

fn plain_item(item: &Item) -> String {
    item.as_value().map_or_else(|| format!("a {}", item.type_name()), plain)
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
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use insta::assert_snapshot;

    use super::*;
    use crate::machine::cargo_config::Origin;

    fn config() -> HostConfig {
        HostConfig {
            backend: "/s t/ö/librustc_codegen_cuda.so".into(),
            extra_rustflags: vec!["-C".to_owned(), "link-arg=-L/my libs".to_owned()],
            triple: "x86_64-unknown-linux-gnu".to_owned(),
            env: BTreeMap::from([("CUDA_OXIDE_LLC".to_owned(), "/usr/bin/llc-22".to_owned())]),
        }
    }

    /// A folder with the host config at its usual place.
    struct Case(tempfile::TempDir);

    impl Case {
        fn new(text: impl AsRef<[u8]>) -> Self {
            let case = Case(tempfile::tempdir().unwrap());
            fs_err::create_dir(case.0.path().join(".cargo")).unwrap();
            fs_err::write(case.path(), text).unwrap();
            case
        }

        fn path(&self) -> PathBuf {
            self.0.path().join(FILE_NAME)
        }

        fn text(&self) -> String {
            fs_err::read_to_string(self.path()).unwrap()
        }

        fn shown(&self, text: &str) -> String {
            text.replace(&self.0.path().display().to_string(), "[]")
        }

        fn warnings(&self) -> String {
            self.shown(&write(&self.path(), &config()).unwrap().warnings.join("\n"))
        }

        fn error(&self) -> String {
            let error = write(&self.path(), &config()).unwrap_err();
            let status = error.exit().status();
            let hint = error.hint_text().unwrap_or_default();
            self.shown(&format!("{} ({status}): {error}\nhint: {hint}", error.code().id))
        }
    }

    /// What `text` becomes; a second write must find nothing to do.
    fn written(text: &str) -> String {
        let case = Case::new(text);
        write(&case.path(), &config()).unwrap();
        assert_eq!(compare(&case.path(), &config()).unwrap(), []);
        let after = case.text();
        let again = write(&case.path(), &config()).unwrap();
        assert!(!again.changed);
        assert_eq!(case.text(), after);
        after
    }

    #[test]
    fn a_new_file_says_whose_its_keys_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let result = write(&path, &config()).unwrap();
        assert_eq!(result, Written { changed: true, warnings: Vec::new() });
        assert_snapshot!(fs_err::read_to_string(&path).unwrap(), @r#"
        # cargo-oxide reads this file. `cargo xtask setup` keeps the keys below a `kiln:` comment up to date;
        # everything else is yours.

        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        [env]
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        "#);
        assert_eq!(written(""), fs_err::read_to_string(&path).unwrap());
    }

    #[test]
    fn b16_the_user_s_keys_comments_and_order_are_kept() {
        assert_snapshot!(written("# mine\n\n# the default\ndefault-arch = 'sm_90' # fast\nbackend = '/old' # old\n\n[env]\n# why\nA = \"b\"\n\n[other]\nx = 1\n"), @r#"
        # mine

        # the default
        default-arch = 'sm_90' # fast
        backend = "/s t/ö/librustc_codegen_cuda.so" # old
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        [env]
        # why
        A = "b"
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"

        [other]
        x = 1
        "#);
        assert_snapshot!(written("# only a comment\n"), @r#"
        # only a comment

        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        [env]
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        "#);
        assert_snapshot!(written("# first\n[env]\nA = 'b'"), @r#"
        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        # first
        [env]
        A = 'b'
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        "#);
        assert_snapshot!(written("# the file's\n\n# the table's\n[env]\nA = 'b'\n"), @r#"
        # the file's

        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        # the table's
        [env]
        A = 'b'
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        "#);
        assert_snapshot!(written("env = { A = 'b' }\n"), @r#"
        env = { A = 'b' , CUDA_OXIDE_LLC = "/usr/bin/llc-22" }
        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]
        "#);
        assert_snapshot!(written("env.A = 'b'\n"), @r#"
        env.A = 'b'
        env.CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]
        "#);
    }

    #[test]
    fn b16_line_endings_and_a_byte_order_mark_are_kept() {
        let text = written("\u{feff}# mine\r\ndefault-arch = 'sm_90'\r\n");
        assert!(text.starts_with("\u{feff}# mine\r\ndefault-arch = 'sm_90'\r\n"), "{text:?}");
        assert_eq!(text.matches('\n').count(), text.matches("\r\n").count());
        let text = written("# a\r\n# b\ndefault-arch = 'sm_90'\n");
        assert!(text.starts_with("# a\r\n# b\ndefault-arch = 'sm_90'\n"), "{text:?}");
        assert_eq!(text.matches("\r\n").count(), 1);
    }

    #[test]
    fn b16_unknown_keys_and_ignored_variables_are_reported() {
        let case = Case::new(
            "extra_rustflags = ['-O']\nextra-rustflags = \"-C x\"\ndefault-arch = 90\nmine = 1\n[env]\nRUSTFLAGS = '-O'\n\
             CUDA_OXIDE_NO_FMA = '0'\nA = 1\n",
        );
        assert_snapshot!(case.warnings(), @r#"
        []/.cargo/cuda-oxide.toml: cargo-oxide does not know the key `extra_rustflags`; did you mean `extra-rustflags`?
        []/.cargo/cuda-oxide.toml: `extra-rustflags` was "-C x", which cargo-oxide refuses; it is an array now
        []/.cargo/cuda-oxide.toml: cargo-oxide refuses a `default-arch` that is not a string
        []/.cargo/cuda-oxide.toml: cargo-oxide does not know the key `mine`
        []/.cargo/cuda-oxide.toml: cargo-oxide ignores `RUSTFLAGS` in `[env]`; put flags into Cargo's config
        []/.cargo/cuda-oxide.toml: `CUDA_OXIDE_NO_FMA` in `[env]` changes what cargo-oxide does and is not kiln's
        []/.cargo/cuda-oxide.toml: cargo-oxide refuses `A` in `[env]`, because it is not a string
        "#);
        assert!(case.text().contains("extra_rustflags = ['-O']\n"));
    }

    #[test]
    fn b16_an_invalid_file_is_refused_and_left_alone() {
        for text in ["backend = \n", "env = 3\nx = 1\n", "a = 1\na = 2\n"] {
            let case = Case::new(text);
            let error = case.error();
            assert!(error.starts_with("KILN-0220 (70): []/.cargo/cuda-oxide.toml:"), "{error}");
            assert_eq!(case.text(), text);
        }
        assert_snapshot!(Case::new("backend = \n").error(), @"
        KILN-0220 (70): []/.cargo/cuda-oxide.toml:1:11: string values must be quoted, expected literal string
          |
        1 | backend =
          |           ^
        hint: mend or remove it, then run `cargo xtask setup`; it was left as it is
        ");
        assert_snapshot!(Case::new("x = 1\nenv = 3\n").error(), @"
        KILN-0220 (70): []/.cargo/cuda-oxide.toml:2:7: `env` must be a table of strings
          |
        1 | x = 1
        2 | env = 3
          |       ^
        hint: mend or remove it, then run `cargo xtask setup`; it was left as it is
        ");
        assert_snapshot!(Case::new(b"\xff").error(), @"
        KILN-0220 (70): []/.cargo/cuda-oxide.toml is not UTF-8 text, expected a TOML file
        hint: mend or remove it, then run `cargo xtask setup`
        ");
        let case = Case::new("");
        fs_err::remove_file(case.path()).unwrap();
        fs_err::create_dir(case.path()).unwrap();
        assert_snapshot!(case.error(), @"
        KILN-0220 (70): []/.cargo/cuda-oxide.toml is a folder, expected a TOML file
        hint: mend or remove it, then run `cargo xtask setup`
        ");
    }

    #[test]
    fn b16_a_link_is_written_through() {
        let case = Case::new("");
        let real = case.0.path().join("real.toml");
        fs_err::remove_file(case.path()).unwrap();
        symlink("../real.toml", case.path()).unwrap();
        for _ in 0..2 {
            write(&case.path(), &config()).unwrap();
            assert!(fs_err::symlink_metadata(case.path()).unwrap().is_symlink());
            assert!(fs_err::read_to_string(&real).unwrap().contains("backend = "));
            fs_err::write(&real, "default-arch = 'sm_90'\n").unwrap();
        }
    }

    #[test]
    fn b16_a_read_only_file_is_named_and_left_alone() {
        let case = Case::new("default-arch = 'sm_90'\n");
        fs_err::set_permissions(case.path(), std::fs::Permissions::from_mode(0o444)).unwrap();
        assert_snapshot!(case.error(), @r#"
        KILN-0222 (1): []/.cargo/cuda-oxide.toml is read-only and would have to change:
          backend = "/s t/ö/librustc_codegen_cuda.so"
          extra-rustflags = ["-C", "link-arg=-L/my libs"]
          env.CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        hint: `chmod u+w '[]/.cargo/cuda-oxide.toml'`, then `cargo xtask setup`
        "#);
        assert_eq!(case.text(), "default-arch = 'sm_90'\n");
    }

    #[test]
    fn b16_a_read_only_folder_is_named() {
        let case = Case::new("");
        let folder = case.0.path().join(".cargo");
        fs_err::set_permissions(&folder, std::fs::Permissions::from_mode(0o555)).unwrap();
        // The superuser may write anywhere.
        if fs_err::write(folder.join("probe"), "").is_err() {
            assert!(case.error().starts_with("KILN-0102 (1): cannot write []/.cargo/cuda-oxide.toml"));
        }
        fs_err::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn b16_the_mode_is_kept_and_an_unchanged_file_is_not_written() {
        let case = Case::new("");
        fs_err::set_permissions(case.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(write(&case.path(), &config()).unwrap().changed);
        let first = fs_err::metadata(case.path()).unwrap();
        assert_eq!(first.permissions().mode() & 0o777, 0o640);
        assert!(!write(&case.path(), &config()).unwrap().changed);
        assert_eq!(fs_err::metadata(case.path()).unwrap().ino(), first.ino());
    }

    #[test]
    fn b16_two_writers_at_once_both_succeed() {
        let case = Case::new("# mine\ndefault-arch = 'sm_90'\n");
        let other = HostConfig { backend: "/other.so".into(), extra_rustflags: Vec::new(), ..config() };
        let path = case.path();
        std::thread::scope(|scope| {
            for config in [config(), other.clone(), config(), other.clone()] {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..10 {
                        write(path, &config).unwrap();
                    }
                });
            }
        });
        let drifts = [compare(&path, &config()).unwrap(), compare(&path, &other).unwrap()];
        assert!(drifts.contains(&Vec::new()), "{drifts:?}");
        assert!(case.text().starts_with("# mine\ndefault-arch = 'sm_90'\n"));
        assert_eq!(fs_err::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_variable_that_is_no_longer_needed_goes_with_its_comment() {
        let case = Case::new("[env]\nA = 'b'\nCUDA_OXIDE_OPT = '/mine'\n");
        write(&case.path(), &config()).unwrap();
        let config = HostConfig { env: BTreeMap::new(), triple: "aarch64".to_owned(), ..config() };
        assert_eq!(
            compare(&case.path(), &config).unwrap(),
            [Drift {
                key: "env.CUDA_OXIDE_LLC".to_owned(),
                have: Some("\"/usr/bin/llc-22\"".to_owned()),
                want: None
            }]
        );
        write(&case.path(), &config).unwrap();
        assert!(case.text().ends_with("[env]\nA = 'b'\nCUDA_OXIDE_OPT = '/mine'\n"), "{}", case.text());
    }

    #[test]
    fn another_host_renews_the_comment() {
        let case = Case::new("");
        write(&case.path(), &config()).unwrap();
        let config = HostConfig {
            extra_rustflags: Vec::new(),
            triple: "aarch64-unknown-linux-gnu".to_owned(),
            ..config()
        };
        write(&case.path(), &config).unwrap();
        assert!(case.text().contains("would use for aarch64-unknown-linux-gnu\nextra-rustflags = []\n"));
        assert!(!case.text().contains("x86_64"));
    }

    #[test]
    fn g1_folders_with_spaces_and_other_letters() {
        let case = Case::new("");
        let path = case.0.path().join("a b/ü").join(FILE_NAME);
        write(&path, &config()).unwrap();
        assert_eq!(compare(&path, &config()).unwrap(), []);
        assert!(!write(&path, &config()).unwrap().changed);
    }

    #[test]
    fn b17_relative_and_undecodable_paths_are_never_written() {
        use std::os::unix::ffi::OsStringExt as _;
        let case = Case::new("backend = 'target/b.so'\n");
        for backend in ["target/b.so".into(), std::ffi::OsString::from_vec(b"/\xff.so".to_vec())] {
            let error = write(&case.path(), &HostConfig { backend: backend.into(), ..config() }).unwrap_err();
            assert_eq!(error.code().id, HOST_CONFIG_PATH.id);
        }
        assert_eq!(case.text(), "backend = 'target/b.so'\n");
        assert_snapshot!(case.warnings(), @"[]/.cargo/cuda-oxide.toml: `backend` was relative, which cargo-oxide takes from `.cargo/`; it is absolute now");
    }

    #[test]
    fn b5_drift_shows_both_sides() {
        let case =
            Case::new("backend = '/old.so'\nextra-rustflags = [\n  '-C', # one\n  'target-cpu=native',\n]\n");
        let drifts = compare(&case.path(), &config()).unwrap();
        let origin = Origin {
            place: Place::File("/p/.cargo/config.toml".into()),
            key: "build.rustflags".to_owned(),
            flags: config().extra_rustflags,
        };
        let flags = HostFlags { flags: origin.flags.clone(), origin: vec![origin], warnings: Vec::new() };
        let error = drift_error(&case.path(), &drifts, &flags);
        assert_eq!(error.exit().status(), 70);
        let shown = format!("{}: {error}\nhint: {}", error.code().id, error.hint_text().unwrap());
        assert_snapshot!(case.shown(&shown), @r#"
        KILN-0221: []/.cargo/cuda-oxide.toml is not what this machine needs:
          backend: setup writes "/s t/ö/librustc_codegen_cuda.so", cuda-oxide.toml has "/old.so"
          extra-rustflags: config.toml has ["-C", "link-arg=-L/my libs"], cuda-oxide.toml has ["-C", "target-cpu=native"]
          env.CUDA_OXIDE_LLC: setup writes "/usr/bin/llc-22", cuda-oxide.toml has nothing
          caused by: ["-C", "link-arg=-L/my libs"] from /p/.cargo/config.toml `build.rustflags`
        hint: run `cargo xtask setup`
        "#);
    }

    #[test]
    fn b5_equal_values_in_another_spelling_are_no_drift() {
        let text = "extra-rustflags = [\n  '-C', # one\n  \"link-arg=-L/my libs\",\n]\nbackend = \"/s t/\\u00f6/librustc_codegen_cuda.so\"\n\
                    env = { CUDA_OXIDE_LLC = '/usr/bin/llc-22' }\n";
        assert_eq!(compare(&Case::new(text).path(), &config()).unwrap(), []);
    }

    const TOP: &[&str] = &[
        "# c1",
        "",
        "default-arch = 'x' # c2",
        "# c3\nbackend = 'o' # c4",
        "extra-rustflags = 'text' # c5",
        "x.y = 1",
        "z = { a = 1 } # c6",
        "env.B = 'c' # c7",
        "env = { CUDA_OXIDE_LLC = 'd' } # c8",
        "text = '''\none\ntwo'''",
    ];

    const BELOW: &[&str] = &[
        "",
        "# c9",
        "# c10\n[env] # c11\nA = 'b' # c12",
        "# c13\nCUDA_OXIDE_LLC = 3 # c14",
        "[[list]] # c15\nk = 1",
        "\n# c16\n[t.u]\nv = 1 # c17",
        "# c18",
    ];

    proptest::proptest! {
        // Each case writes and flushes a file.
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

        #[test]
        fn nothing_of_the_user_s_is_lost(
            top in proptest::sample::subsequence(TOP, 0..=TOP.len()),
            below in proptest::sample::subsequence(BELOW, 0..=BELOW.len()),
            ending in proptest::sample::select(vec!["\n", "\r\n"]),
        ) {
            let text = [top, below].concat().join("\n").replace('\n', ending);
            let Ok(mut before) = text.parse::<toml::Table>() else { return Ok(()) };
            let after = written(&text);
            let mut parsed: toml::Table = after.parse().unwrap();
            for table in [&mut before, &mut parsed] {
                table.remove(BACKEND);
                table.remove(EXTRA_RUSTFLAGS);
                if let Some(toml::Value::Table(env)) = table.get_mut(ENV) {
                    env.remove("CUDA_OXIDE_LLC");
                }
            }
            before.entry(ENV).or_insert_with(|| toml::Table::new().into());
            proptest::prop_assert_eq!(&parsed, &before);
            let comments = |text: &str| {
                let found = text.lines().filter_map(|line| line.split_once("# c"));
                found.map(|(_, comment)| comment.trim_end().to_owned()).collect::<Vec<_>>()
            };
            let kept = comments(&after);
            for comment in comments(&text) {
                proptest::prop_assert!(kept.contains(&comment), "{comment} in {after}");
            }
        }

        #[test]
        fn other_lines_keep_their_endings(lines in proptest::collection::vec("(# [a-z]{0,3})?(\r)?", 0..8)) {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let split = Lines::split(&text);
            proptest::prop_assert_eq!(split.join(&split.lf()), text);
        }
    }
}
