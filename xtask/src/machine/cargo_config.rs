//! The host flags that Cargo itself would pass to rustc in this workspace, each with the place it comes from; and
//! the compiler overrides that are set around it.
//!
//! cargo-oxide sets `CARGO_ENCODED_RUSTFLAGS`, which makes Cargo ignore every `rustflags` of its config files. So
//! they are resolved here, by Cargo 1.95's rules, and handed on. `cargo-config2` finds the files, `cargo-platform`
//! (Cargo's own crate) evaluates `cfg(...)` tables. Merging is done here because three things that Cargo does are
//! not in `cargo-config2` 0.1.45: `include`, `cfg(debug_assertions)` (which holds), and cfg tables that depend on
//! the flags themselves. What only nightly Cargo reads (`[host]`, `target-applies-to-host`, `--config`) is left out.

mod file;

use self::file::{Content, Include, Layer, StringList, Tables};

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_platform::{Cfg, CfgExpr};

use crate::base::env::Env;
use crate::base::process::{self, Failure};
use crate::base::toml_context::excerpt;
use crate::codes;
use crate::report::error::{Error, Result};

codes! {
    CARGO_CONFIG_INVALID = "KILN-0210", Machine, "a Cargo config file is not valid",
        "Cargo's config files (`.cargo/config.toml` in this folder and every folder above it, and in Cargo's home) \
         are read for the host flags. Cargo itself refuses this file, too. The message shows the line.";
    CARGO_CONFIG_CLASH = "KILN-0211", Machine, "two Cargo config files give one key different types",
        "Cargo joins arrays of several config files, and lets the nearest string win; it refuses to merge a string \
         with an array, and so does kiln. Write `rustflags` as an array in both files.";
    CFG_QUERY = "KILN-0212", Machine, "rustc cannot tell which cfg tables apply",
        "A Cargo config file has flags under `[target.'cfg(...)']`. Whether they apply is asked from the \
         pinned rustc, with the other host flags, as Cargo does. rustc did not answer; usually one of the \
         flags is wrong, and Cargo fails with the same message. Mend the flag, or the path of rustc that the \
         message shows.";
}

/// The host flags, in the order in which rustc gets them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFlags {
    /// One argument each; no element is empty.
    pub flags: Vec<String>,
    /// Where they come from, in the same order: the elements' flags joined are [`HostFlags::flags`].
    pub origin: Vec<Origin>,
    /// What a reader of the config files would not expect, one sentence each.
    pub warnings: Vec<String>,
}

/// Some of the flags and the place that they come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The file or variable.
    pub place: Place,
    /// The key as Cargo names it, such as `target.x86_64-unknown-linux-gnu.rustflags`; a variable's own name.
    pub key: String,
    /// The flags, one argument each.
    pub flags: Vec<String>,
}

/// Where a setting is written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A Cargo config file.
    File(PathBuf),
    /// An environment variable.
    Variable(String),
}

/// A setting that puts another program in rustc's place, or in front of it. Builds of kiln clear them all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// What is replaced.
    pub setting: Setting,
    /// Where it is written.
    pub place: Place,
    /// The key as Cargo names it; a variable's own name.
    pub key: String,
    /// The value as written; empty switches a wrapper off.
    pub value: String,
    /// The program that Cargo would run: absolute, or a bare name that is looked up on PATH.
    pub program: PathBuf,
    /// Whether it is the one that wins among those of the same setting.
    pub effective: bool,
    /// Why Cargo could not run it.
    pub problem: Option<String>,
}

/// What an [`Override`] replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// The compiler.
    Rustc,
    /// The program that is run with the compiler as its first argument.
    RustcWrapper,
    /// The same, for the workspace's own crates.
    RustcWorkspaceWrapper,
}

/// The Cargo config files that count for a workspace, and the environment that overrides them.
#[derive(Debug)]
pub struct CargoConfig<'a> {
    env: &'a Env,
    /// Lowest priority first.
    layers: Vec<Layer>,
    warnings: Vec<String>,
}

/// The host flags that Cargo would use for `host` in the workspace at `root`. `rustc` is the pinned compiler's
/// path; it is run only when a `cfg(...)` table has flags.
///
/// # Errors
/// A config file is unreadable, invalid or clashes with another one, or rustc refuses the flags.
pub fn host_flags(root: &Path, env: &Env, rustc: &Path, host: &str) -> Result<HostFlags> {
    CargoConfig::load(root, env)?.host_flags(rustc, host)
}

impl<'a> CargoConfig<'a> {
    /// Reads the config files that Cargo would read in `root`: those of its physical parents, then Cargo's home.
    ///
    /// # Errors
    /// A file is unreadable ([`crate::report::error::ACCESS`]) or invalid ([`CARGO_CONFIG_INVALID`]).
    pub fn load(root: &Path, env: &'a Env) -> Result<Self> {
        let physical = fs_err::canonicalize(root)?;
        let mut config = CargoConfig { env, layers: Vec::new(), warnings: Vec::new() };
        let home = cargo_home(env, &mut config.warnings)?;
        // Cargo compares the real folders, so that a home that is also a parent counts once.
        let home = home.map(|home| home.canonicalize().unwrap_or(home)).filter(|home| {
            !physical
                .ancestors()
                .any(|folder| folder.join(".cargo").canonicalize().is_ok_and(|parent| parent == *home))
        });
        let mut files: Vec<_> = cargo_config2::Walk::with_cargo_home(&physical, home).collect();
        files.reverse();
        for file in files {
            config.warn_of_legacy_name(&file);
            config.read(&file, &mut BTreeSet::new())?;
        }
        Ok(config)
    }

    /// The flags for `host`, see [`host_flags`].
    ///
    /// # Errors
    /// Two files clash ([`CARGO_CONFIG_CLASH`]), or rustc refuses the flags ([`CFG_QUERY`]).
    pub fn host_flags(&self, rustc: &Path, host: &str) -> Result<HostFlags> {
        let mut warnings = self.warnings.clone();
        self.warn_of_misplaced_keys(&mut warnings);
        let tables = self.tables(host, &mut warnings)?;
        let mut origin = match self.flags_of_environment(&mut warnings) {
            Some(origin) => vec![origin],
            None => self.flags_of_files(&tables, rustc, &mut warnings)?,
        };
        for origin in &mut origin {
            let before = origin.flags.len();
            origin.flags.retain(|flag| !flag.is_empty());
            if origin.flags.len() != before {
                warnings.push(format!("{origin}: an empty flag is left out; Cargo would fail on it"));
            }
            warnings.extend(origin.flags.iter().filter_map(|flag| doubtful(flag, origin)));
        }
        origin.retain(|origin| !origin.flags.is_empty());
        let flags = origin.iter().flat_map(|origin| origin.flags.iter().cloned()).collect();
        Ok(HostFlags { flags, origin, warnings })
    }

    /// Every compiler override that is set, by setting, the winning one first.
    pub fn overrides(&self) -> Vec<Override> {
        let search = self.env.search_path();
        let cwd = self.env.cwd().ok();
        let mut found = Vec::new();
        for (setting, variables, key) in OVERRIDES {
            let first = found.len();
            for variable in *variables {
                if let Some(value) = raw(self.env, variable) {
                    let value = value.to_string_lossy().into_owned();
                    let place = Place::Variable((*variable).to_owned());
                    found.push(Override::new(*setting, place, variable, value, cwd, &search));
                }
            }
            for layer in self.layers.iter().rev() {
                if let Some(value) = layer.content.build.as_ref().and_then(|build| build.0.program(*setting))
                {
                    // Cargo takes the folder that holds `.cargo`.
                    let base = layer.path.parent().and_then(Path::parent);
                    let place = Place::File(layer.path.clone());
                    found.push(Override::new(*setting, place, key, value.to_owned(), base, &search));
                }
            }
            if let Some(winner) = found.get_mut(first) {
                winner.effective = true;
            }
        }
        found
    }

    fn warn_of_legacy_name(&mut self, file: &Path) {
        if file.extension().is_some() {
            return;
        }
        let modern = file.with_extension("toml");
        let is_link_to_modern =
            fs_err::read_link(file).is_ok_and(|to| Some(to.as_os_str()) == modern.file_name());
        if is_link_to_modern {
            return;
        }
        self.warnings.push(if modern.exists() {
            format!("{} hides {}: Cargo reads the file without an ending", file.display(), modern.display())
        } else {
            format!("{} is an old name that Cargo warns about: rename it to config.toml", file.display())
        });
    }

    /// Reads `file` after what it includes, so that its own values win.
    fn read(&mut self, file: &Path, seen: &mut BTreeSet<PathBuf>) -> Result<()> {
        let bytes = match fs_err::read(file) {
            Err(error) if error.kind() == std::io::ErrorKind::IsADirectory => {
                let message = format!("{} is a folder, expected a config file", file.display());
                return Err(Error::new(&CARGO_CONFIG_INVALID, message).hint("remove or rename the folder"));
            }
            read => read.map_err(|error| Error::from(error).hint("Cargo must read this file, too"))?,
        };
        let text = str::from_utf8(&bytes).map_err(|error| {
            let message =
                format!("{} is not UTF-8 text: wrong byte at offset {}", file.display(), error.valid_up_to());
            Error::new(&CARGO_CONFIG_INVALID, message).hint("save the file as UTF-8")
        })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let invalid = |span: Range<usize>, message: &str| {
            Error::new(&CARGO_CONFIG_INVALID, excerpt(file, text, span, message))
                .hint("mend the file; Cargo refuses it, too")
        };
        let content: Content = toml::from_str(text)
            .map_err(|error| invalid(error.span().unwrap_or_default(), error.message().trim_end()))?;

        seen.insert(file.canonicalize().unwrap_or_else(|_| file.to_owned()));
        for include in &content.include {
            let (path, optional) = match include.get_ref() {
                Include::Path(path) => (path, false),
                Include::Table { path, optional } => (path, *optional),
            };
            if !path.ends_with(".toml") {
                return Err(invalid(include.span(), "the path of an include must end in `.toml`"));
            }
            let path = file.parent().unwrap_or(Path::new("/")).join(path);
            if optional && !path.exists() {
                continue;
            }
            if seen.contains(&path.canonicalize().unwrap_or_else(|_| path.clone())) {
                return Err(invalid(include.span(), "this file is included twice, or includes itself"));
            }
            self.read(&path, seen).map_err(|error| match error.code().id == crate::report::error::IO.id {
                true => invalid(include.span(), "the included file cannot be read").cause(error),
                false => error,
            })?;
        }
        self.layers.push(Layer { path: file.to_owned(), content });
        Ok(())
    }

    fn warn_of_misplaced_keys(&self, warnings: &mut Vec<String>) {
        for layer in self.layers.iter().filter(|layer| layer.content.rustflags.is_some()) {
            warnings.push(format!(
                "{}: `rustflags` outside of a table has no effect; did you mean `[build]`?",
                layer.path.display()
            ));
        }
    }

    /// Every table that has flags, merged over all files.
    fn tables(&self, host: &str, warnings: &mut Vec<String>) -> Result<Tables> {
        let names: BTreeSet<_> = self.layers.iter().flat_map(|layer| layer.content.target.keys()).collect();
        let mut tables = Tables::default();
        for name in names {
            let key = if is_bare_key(name) {
                format!("target.{name}.rustflags")
            } else {
                format!("target.'{name}'.rustflags")
            };
            // Merged even when it cannot apply, because Cargo refuses a clash anywhere.
            let origin = self.merged(&key, |content| content.target.get(name)?.0.rustflags.as_ref())?;
            if name == host {
                tables.triple = origin;
            } else if name.starts_with("cfg(") && origin.iter().any(|origin| !origin.flags.is_empty()) {
                let expression = name.strip_prefix("cfg(").and_then(|rest| rest.strip_suffix(')'));
                match expression.map(str::parse::<CfgExpr>) {
                    Some(Ok(expression)) => tables.cfg.push((expression, origin)),
                    // Cargo says nothing about such a table.
                    _ => warnings.extend(origin.iter().map(|origin| {
                        format!("{origin}: not a valid cfg expression, so Cargo ignores the table")
                    })),
                }
            }
        }
        let variable = format!("CARGO_TARGET_{}_RUSTFLAGS", host.to_uppercase().replace(['-', '.'], "_"));
        tables.triple.extend(self.variable(&variable, warnings));
        tables.build =
            self.merged("build.rustflags", |content| content.build.as_ref()?.0.rustflags.as_ref())?;
        tables.build.extend(self.variable("CARGO_BUILD_RUSTFLAGS", warnings));
        Ok(tables)
    }

    /// One key over all files: arrays are joined, parents first; of strings the nearest wins.
    fn merged(&self, key: &str, pick: impl Fn(&Content) -> Option<&StringList>) -> Result<Vec<Origin>> {
        let mut merged: Vec<Origin> = Vec::new();
        let mut before: Option<(&StringList, &Path)> = None;
        for layer in &self.layers {
            let Some(list) = pick(&layer.content) else { continue };
            if let Some((other, path)) = before
                && list.kind() != other.kind()
            {
                let message = format!(
                    "`{key}` is {} in {} and {} in {}; Cargo cannot merge them",
                    other.kind(),
                    path.display(),
                    list.kind(),
                    layer.path.display()
                );
                return Err(
                    Error::new(&CARGO_CONFIG_CLASH, message).hint("write it as an array in both files")
                );
            }
            before = Some((list, &layer.path));
            let flags = match list {
                StringList::Array(flags) => flags.clone(),
                StringList::String(text) => {
                    merged.clear();
                    text.split_whitespace().map(str::to_owned).collect()
                }
            };
            merged.push(Origin { place: Place::File(layer.path.clone()), key: key.to_owned(), flags });
        }
        Ok(merged)
    }

    fn variable(&self, name: &str, warnings: &mut Vec<String>) -> Option<Origin> {
        let text = utf8(self.env, name, warnings)?;
        let flags = text.split_whitespace().map(str::to_owned).collect();
        Some(Origin { place: Place::Variable(name.to_owned()), key: name.to_owned(), flags })
    }

    /// The variables that make Cargo ignore its files; one that is set and empty does, too.
    fn flags_of_environment(&self, warnings: &mut Vec<String>) -> Option<Origin> {
        let encoded = "CARGO_ENCODED_RUSTFLAGS";
        let plain = "RUSTFLAGS";
        let (name, flags): (_, Vec<_>) = if let Some(text) = utf8(self.env, encoded, warnings) {
            let flags =
                if text.is_empty() { Vec::new() } else { text.split('\x1f').map(str::to_owned).collect() };
            (encoded, flags)
        } else {
            let text = utf8(self.env, plain, warnings)?;
            // Spaces alone separate here, and other white space is trimmed, as Cargo has it.
            let parts = text.split(' ').map(str::trim).filter(|part| !part.is_empty());
            (plain, parts.map(str::to_owned).collect())
        };
        if flags.is_empty() {
            warnings.push(format!(
                "{name} is set and empty: Cargo ignores every `rustflags` of its config files"
            ));
        }
        Some(Origin { place: Place::Variable(name.to_owned()), key: name.to_owned(), flags })
    }

    fn flags_of_files(
        &self,
        tables: &Tables,
        rustc: &Path,
        warnings: &mut Vec<String>,
    ) -> Result<Vec<Origin>> {
        let first = tables.effective(None);
        if tables.cfg.is_empty() {
            return Ok(first);
        }
        // Flags decide which cfg tables apply, and those hold flags. Like Cargo, look twice and then stop.
        let second = tables.effective(Some(&self.query_cfg(rustc, &first)?));
        if second == first {
            return Ok(second);
        }
        let third = tables.effective(Some(&self.query_cfg(rustc, &second)?));
        if third != second {
            warnings.push(
                "the cfg tables of Cargo's config files depend on their own flags; Cargo stops after two rounds"
                    .to_owned(),
            );
        }
        Ok(second)
    }

    fn query_cfg(&self, rustc: &Path, flags: &[Origin]) -> Result<Vec<Cfg>> {
        let mut command = Command::new(rustc);
        command.env_clear().envs(self.env.vars()).env_remove("RUSTC_LOG");
        command.args(["-", "--crate-name", "___", "--print=cfg", "-Wwarnings"]);
        command.args(flags.iter().flat_map(|origin| &origin.flags).filter(|flag| !flag.is_empty()));
        let failed = |why: String| {
            let error = Error::new(&CFG_QUERY, format!("`{} --print=cfg` {why}", rustc.display()));
            let given = flags.iter().map(|origin| format!("host flags {:?} from {origin}", origin.flags));
            given.fold(error, Error::cause).hint("mend the flag, or the path of rustc")
        };
        let output =
            process::output(&mut command, process::PROBE_LIMIT).map_err(|failure| match failure {
                Failure::Start(error) => failed(format!("could not be started: {error}")),
                Failure::TimedOut(limit) => failed(format!("did not end within {} s", limit.as_secs())),
            })?;
        if !output.status.success() {
            return Err(failed(format!("failed: {}", output.stderr.trim())));
        }
        let parsed = output.stdout.lines().map(str::parse::<Cfg>);
        let cfg: Vec<_> = parsed
            .collect::<Result<_, _>>()
            .map_err(|error| failed(format!("printed no cfg list: {error}")))?;
        // Cargo leaves it out, because it would hold for every crate here.
        Ok(cfg
            .into_iter()
            .filter(|cfg| !matches!(cfg, Cfg::Name(name) if name.as_str() == "proc_macro"))
            .collect())
    }
}

impl Override {
    fn new(
        setting: Setting,
        place: Place,
        key: &str,
        value: String,
        base: Option<&Path>,
        search: &[PathBuf],
    ) -> Self {
        let written = Path::new(&value);
        let is_bare = !value.contains('/');
        let program = match base {
            // Collected anew, which drops every `.`.
            Some(base) if !is_bare => base.join(written).components().collect(),
            _ => written.to_owned(),
        };
        let is_found = if is_bare {
            search.iter().any(|folder| folder.join(written).is_file())
        } else {
            program.is_file()
        };
        let problem = match (value.is_empty(), is_found, is_bare) {
            (true, ..) | (_, true, _) => None,
            (_, _, true) => Some("is not on PATH".to_owned()),
            (_, _, false) => Some(format!("{} does not exist or is not a file", program.display())),
        };
        Override { setting, place, key: key.to_owned(), value, program, effective: false, problem }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::File(path) => write!(f, "{} `{}`", path.display(), self.key),
            Place::Variable(name) => f.write_str(name),
        }
    }
}

impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Variable(name) => write!(f, "{name}={}", self.value),
            Place::File(_) => write!(f, "{} = {:?} in {}", self.key, self.value, self.place),
        }?;
        self.problem.as_ref().map_or(Ok(()), |problem| write!(f, " ({problem})"))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File(path) => path.display().fmt(f),
            Place::Variable(name) => f.write_str(name),
        }
    }
}

/// `$CARGO_HOME`, made absolute against the invocation folder, or `.cargo` in the home folder.
fn cargo_home(env: &Env, warnings: &mut Vec<String>) -> Result<Option<PathBuf>> {
    if let Some(home) = env.path("CARGO_HOME")? {
        crate::base::env::refuse_tilde(Path::new(env.var("CARGO_HOME").unwrap_or_default()), "CARGO_HOME")?;
        return Ok(Some(home));
    }
    if let Some(home) = env.var("HOME") {
        return Ok(Some(Path::new(home).join(".cargo")));
    }
    warnings.push("neither CARGO_HOME nor HOME is set: no config file of a home folder is read".to_owned());
    Ok(None)
}

/// The variable as it is set; unlike [`Env::var`], empty is a value, because Cargo tells the two apart.
fn raw<'a>(env: &'a Env, name: &str) -> Option<&'a OsStr> {
    env.vars().find(|(key, _)| *key == name).map(|(_, value)| value)
}

fn utf8<'a>(env: &'a Env, name: &str, warnings: &mut Vec<String>) -> Option<&'a str> {
    let value = raw(env, name)?;
    if value.to_str().is_none() {
        warnings.push(format!("{name} is not UTF-8: Cargo ignores it"));
    }
    value.to_str()
}

fn is_bare_key(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
}

/// Says what rustc will make of a flag that is probably not what its author meant. It is passed on unchanged.
fn doubtful(flag: &str, origin: &Origin) -> Option<String> {
    if let Some((option, rest)) = flag.split_once(char::is_whitespace)
        && TAKES_VALUE.contains(&option)
    {
        let rest = rest.trim_start();
        return Some(format!(
            "{origin}: `{flag}` is one argument with a space in it, which rustc refuses; write \"{option}\", \
             \"{rest}\" as two elements"
        ));
    }
    let is_unbalanced = ['"', '\''].iter().any(|quote| flag.matches(*quote).count() % 2 == 1);
    is_unbalanced.then(|| {
        format!(
            "{origin}: `{flag}` has half of a pair of quotes; quotes do not keep words of a string together"
        )
    })
}

/// Options of rustc that are followed by their value in the next argument.
const TAKES_VALUE: &[&str] = &[
    "-A",
    "-C",
    "-D",
    "-F",
    "-L",
    "-W",
    "-Z",
    "-l",
    "--allow",
    "--cap-lints",
    "--cfg",
    "--check-cfg",
    "--codegen",
    "--deny",
    "--extern",
    "--forbid",
    "--warn",
];

/// Settings with their variables, strongest first, and the key in config files.
const OVERRIDES: &[(Setting, &[&str], &str)] = &[
    (Setting::Rustc, &["RUSTC", "CARGO_BUILD_RUSTC"], "build.rustc"),
    (Setting::RustcWrapper, &["RUSTC_WRAPPER", "CARGO_BUILD_RUSTC_WRAPPER"], "build.rustc-wrapper"),
    (
        Setting::RustcWorkspaceWrapper,
        &["RUSTC_WORKSPACE_WRAPPER", "CARGO_BUILD_RUSTC_WORKSPACE_WRAPPER"],
        "build.rustc-workspace-wrapper",
    ),
];

#[cfg(test)]
mod tests;
