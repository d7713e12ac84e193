//! The record of a build: what went in, what came out.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use fs_err as fs;
use serde_json::json;

use super::cost::Cost;
use super::{LOAD_CHECK_ARCH, Making, PROFILE, RECIPE, cargo_oxide_name, library_name};
use crate::base::hash::Sha256;
use crate::report::error::Result;
use crate::store::record::{self, BuildDefinition, Builder, Metadata, Resource, RunDetails, Statement};
use crate::store::{self, Key};

pub(super) fn statement(
    making: &Making<'_>,
    key: &Key,
    staged: &Path,
    ptx: &str,
    cost: &Cost,
    started: String,
) -> Result<Statement> {
    let pin = making.pin;
    let file = |name: &str| -> Result<Resource> {
        Ok(Resource::file(name, &Sha256::of_reader(fs::File::open(staged.join(name))?)?))
    };
    let dependency = |name: Option<&str>, uri: Option<String>, algorithm: &str, digest: String| Resource {
        name: name.map(str::to_owned),
        uri,
        digest: [(algorithm.to_owned(), digest)].into(),
        annotations: Default::default(),
    };
    let uri = format!("git+{}@{}", pin.source.repository, pin.source.revision);
    let mut dependencies = vec![
        dependency(None, Some(uri), "gitCommit", pin.source.revision.to_string()),
        dependency(Some("tree"), None, "narSha256Sri", pin.source.tree.to_string()),
        dependency(Some("patched tree"), None, "narSha256Sri", making.source.hash.to_string()),
        Resource::file(pin.source.lock.as_str(), &pin.source.lock_sha256),
    ];
    dependencies
        .extend(making.patches.iter().map(|patch| Resource::file(patch.file.as_str(), &patch.sha256)));
    let flags: serde_json::Map<String, serde_json::Value> =
        PROFILE.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    let definition = BuildDefinition {
        build_type: record::BUILD_TYPE.to_owned(),
        external_parameters: [
            ("repository".to_owned(), json!(pin.source.repository.as_str())),
            ("revision".to_owned(), json!(pin.source.revision.as_str())),
            ("backend".to_owned(), json!(pin.source.backend.as_str())),
            ("cargoOxide".to_owned(), json!(pin.source.cargo_oxide.as_str())),
        ]
        .into(),
        internal_parameters: [
            ("key".to_owned(), json!(key.to_string())),
            ("recipe".to_owned(), json!(RECIPE)),
            ("rustc".to_owned(), json!(making.toolchain.version.text)),
            ("environment".to_owned(), json!(flags)),
        ]
        .into(),
        resolved_dependencies: dependencies,
    };
    let tool =
        |tool: &crate::machine::llc::Tool| format!("LLVM {} sha256 {}", tool.version.full, tool.sha256);
    let mut load_check = Resource::file("load-check.ptx", &Sha256::of(ptx.as_bytes()));
    load_check.annotations = [
        ("arch".to_owned(), LOAD_CHECK_ARCH.to_owned()),
        ("llc".to_owned(), tool(&making.tools.llc)),
        ("opt".to_owned(), tool(&making.tools.opt)),
    ]
    .into();
    let run = RunDetails {
        builder: Builder {
            id: "urn:kiln:xtask".to_owned(),
            version: [("xtask".to_owned(), env!("CARGO_PKG_VERSION").to_owned())].into(),
        },
        metadata: Metadata { started_on: started, finished_on: now() },
        byproducts: vec![load_check, cost.resource()],
    };
    Ok(Statement::new(vec![file(&library_name())?, file(&cargo_oxide_name())?], definition, run))
}

pub(super) fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
    format!("{}Z", store::utc(seconds))
}
