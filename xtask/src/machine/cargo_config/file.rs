//! A configuration file of Cargo as it is written.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cargo_platform::{Cfg, CfgExpr};
use serde::Deserialize;
use toml::Spanned;

use super::{Origin, Setting};
use crate::base::toml_context::Table;

/// Flags by where Cargo looks for them.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) triple: Vec<Origin>,
    /// In the order of their keys' text, which is Cargo's.
    pub(super) cfg: Vec<(CfgExpr, Vec<Origin>)>,
    pub(super) build: Vec<Origin>,
}

impl Tables {
    /// The triple's flags, then those of the cfg tables that hold; `[build]` only when there are none at all.
    pub(super) fn effective(&self, cfg: Option<&[Cfg]>) -> Vec<Origin> {
        let holding =
            self.cfg.iter().filter(|(expression, _)| cfg.is_some_and(|cfg| expression.matches(cfg)));
        let target: Vec<_> =
            self.triple.iter().chain(holding.flat_map(|(_, origin)| origin)).cloned().collect();
        if target.iter().all(|origin| origin.flags.is_empty()) { self.build.clone() } else { target }
    }
}

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) path: PathBuf,
    pub(super) content: Content,
}

/// What of a config file matters here; Cargo allows any other key.
#[derive(Debug, Deserialize)]
pub(super) struct Content {
    #[serde(default)]
    pub(super) include: Vec<Spanned<Include>>,
    pub(super) rustflags: Option<serde::de::IgnoredAny>,
    pub(super) build: Option<Table<Build>>,
    #[serde(default)]
    pub(super) target: BTreeMap<String, Table<Target>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a path, or a table with `path`")]
pub(super) enum Include {
    Path(String),
    Table {
        path: String,
        #[serde(default)]
        optional: bool,
    },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Build {
    pub(super) rustflags: Option<StringList>,
    pub(super) rustc: Option<String>,
    pub(super) rustc_wrapper: Option<String>,
    pub(super) rustc_workspace_wrapper: Option<String>,
}

impl Build {
    pub(super) fn program(&self, setting: Setting) -> Option<&str> {
        match setting {
            Setting::Rustc => self.rustc.as_deref(),
            Setting::RustcWrapper => self.rustc_wrapper.as_deref(),
            Setting::RustcWorkspaceWrapper => self.rustc_workspace_wrapper.as_deref(),
        }
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Target {
    pub(super) rustflags: Option<StringList>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
pub(super) enum StringList {
    String(String),
    Array(Vec<String>),
}

impl StringList {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            StringList::String(_) => "a string",
            StringList::Array(_) => "an array",
        }
    }
}
