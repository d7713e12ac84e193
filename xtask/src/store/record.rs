//! The installed record: an in-toto Statement with a SLSA v1 provenance predicate, beside every built backend.
//!
//! It says what was built (subjects, by sha256), from what (resolved dependencies), and how (parameters). It is also the
//! completion stamp: it is written last, and an entry without it does not exist. See <https://slsa.dev/spec/v1.0/provenance>
//! and <https://in-toto.io/Statement/v1>.

use std::collections::BTreeMap;
use std::path::Path;

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::base::hash::Sha256;
use crate::report::error::{Error, Result};

crate::codes! {
    CHANGED = "KILN-0911", Refusal, "the backend is not the one that setup built",
        "The record beside the backend holds the sha256 of every file that setup published. A file has \
         another one: it was replaced or damaged. Kernels compiled by it would be nobody's kernels. Run \
         `cargo xtask setup`, which builds it anew.";
}

/// The record's file name in a backend's folder.
pub const FILE_NAME: &str = "record.json";

/// The URI that names how a backend is built; its parameters are described in docs/reference.md.
pub const BUILD_TYPE: &str = "urn:kiln:build:backend:v1";

/// in-toto Statement v1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Statement {
    /// `https://in-toto.io/Statement/v1`.
    #[serde(rename = "_type")]
    pub kind: String,
    /// What was built.
    pub subject: Vec<Resource>,
    /// `https://slsa.dev/provenance/v1`.
    pub predicate_type: String,
    /// How.
    pub predicate: Predicate,
}

/// in-toto ResourceDescriptor: the fields that are used here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Resource {
    /// The file's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where it comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// Its hashes by algorithm.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub digest: BTreeMap<String, String>,
    /// Further facts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Resource {
    /// A file with its sha256.
    pub fn file(name: &str, sha256: &Sha256) -> Self {
        Resource {
            name: Some(name.to_owned()),
            uri: None,
            digest: BTreeMap::from([("sha256".to_owned(), sha256.to_string())]),
            annotations: BTreeMap::new(),
        }
    }

    /// The sha256, when there is a valid one.
    pub fn sha256(&self) -> Option<Sha256> {
        self.digest.get("sha256")?.parse().ok()
    }
}

/// SLSA provenance v1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Predicate {
    /// The inputs.
    pub build_definition: BuildDefinition,
    /// This run.
    pub run_details: RunDetails,
}

/// SLSA buildDefinition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuildDefinition {
    /// [`BUILD_TYPE`].
    pub build_type: String,
    /// What PROVENANCE says.
    pub external_parameters: BTreeMap<String, serde_json::Value>,
    /// What the recipe adds: key, flags, rustc.
    pub internal_parameters: BTreeMap<String, serde_json::Value>,
    /// Every input by hash.
    pub resolved_dependencies: Vec<Resource>,
}

/// SLSA runDetails.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RunDetails {
    /// Who built.
    pub builder: Builder,
    /// When.
    pub metadata: Metadata,
    /// What else came out: the load check's PTX.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub byproducts: Vec<Resource>,
}

/// SLSA builder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Builder {
    /// `urn:kiln:xtask`.
    pub id: String,
    /// The version of xtask.
    pub version: BTreeMap<String, String>,
}

/// SLSA build metadata.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// RFC 3339, UTC.
    pub started_on: String,
    /// RFC 3339, UTC.
    pub finished_on: String,
}

impl Statement {
    /// The statement for `subject`.
    pub fn new(subject: Vec<Resource>, definition: BuildDefinition, run: RunDetails) -> Self {
        Statement {
            kind: "https://in-toto.io/Statement/v1".to_owned(),
            subject,
            predicate_type: "https://slsa.dev/provenance/v1".to_owned(),
            predicate: Predicate { build_definition: definition, run_details: run },
        }
    }

    /// Reads the record in `folder`; `None` when there is none.
    ///
    /// # Errors
    /// It is unreadable or not such a statement.
    pub fn load(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILE_NAME);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::from(error).as_damage(&CHANGED, &path)),
        };
        serde_json::from_slice(&bytes).map(Some).map_err(|error| {
            Error::new(&CHANGED, format!("{} is not what setup writes", path.display()))
                .cause(error)
                .hint("run: cargo xtask setup")
        })
    }

    /// Writes the record into `folder`.
    ///
    /// # Errors
    /// The file system fails.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|error| {
            Error::new(&crate::report::error::BUG, format!("cannot write the record: {error}"))
        })?;
        bytes.push(b'\n');
        fs::write(folder.join(FILE_NAME), bytes)?;
        Ok(())
    }

    /// An internal parameter that is a string.
    pub fn internal(&self, name: &str) -> Option<&str> {
        self.predicate.build_definition.internal_parameters.get(name)?.as_str()
    }

    /// The recorded sha256 of the subject called `name`.
    pub fn subject_sha256(&self, name: &str) -> Option<Sha256> {
        self.subject.iter().find(|subject| subject.name.as_deref() == Some(name))?.sha256()
    }
}
