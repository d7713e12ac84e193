//! PROVENANCE as its TOML has it, before it is checked.

use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;

use super::outputs::Output;
use super::values::{PatchName, cuda_release};
use super::{CudaWheel, Kernels, Llvm, Model, Patch, Pin, Source, Toolchain};
use crate::base::hash::Sha256;
use crate::base::toml_context::Table;
use crate::base::version::LlvmMajor;
use crate::report::error::Result;

/// The file as it is written: what the types alone cannot say is checked afterwards, so places are kept.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawPin {
    pub(super) source: Table<Source>,
    #[serde(default)]
    pub(super) patch: Vec<Table<RawPatch>>,
    pub(super) toolchain: Table<Toolchain>,
    pub(super) llvm: Table<RawLlvm>,
    pub(super) libnvvm: Option<Table<RawLibNvvm>>,
    pub(super) kernels: Table<Kernels>,
    #[serde(default)]
    pub(super) output: Vec<Table<Output>>,
    #[serde(default)]
    pub(super) model: Vec<Spanned<Table<Model>>>,
    #[serde(default)]
    pub(super) cuda: Vec<Table<RawCudaWheel>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawCudaWheel {
    pub(super) package: Spanned<String>,
    pub(super) version: Spanned<String>,
    pub(super) target: Spanned<String>,
    pub(super) sha256: Sha256,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawPatch {
    pub(super) file: Spanned<PatchName>,
    pub(super) sha256: Sha256,
    pub(super) reason: Spanned<String>,
    pub(super) upstream: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawLlvm {
    pub(super) preferred: Spanned<LlvmMajor>,
    pub(super) verified: Spanned<Vec<Spanned<LlvmMajor>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawLibNvvm {
    pub(super) verified: Vec<Spanned<String>>,
}

impl RawPin {
    pub(super) fn check(self) -> Result<Pin, (Range<usize>, String)> {
        let mut patches: Vec<Patch> = Vec::new();
        for Table(patch) in self.patch {
            let RawPatch { file, sha256, reason, upstream } = patch;
            let span = file.span();
            let file = file.into_inner();
            if patches.iter().any(|earlier| earlier.file == file) {
                return Err((span, format!("the patch {file} is listed twice")));
            }
            if reason.get_ref().trim().is_empty() {
                return Err((reason.span(), "a patch needs a reason".to_owned()));
            }
            patches.push(Patch { file, sha256, reason: reason.into_inner(), upstream });
        }

        let mut verified = Vec::new();
        let Table(llvm) = self.llvm;
        let all = llvm.verified.span();
        for major in llvm.verified.into_inner() {
            if verified.contains(major.get_ref()) {
                return Err((major.span(), format!("LLVM {} is listed twice", major.get_ref())));
            }
            verified.push(major.into_inner());
        }
        if verified.is_empty() {
            return Err((all, "no LLVM major is verified, expected at least the preferred one".to_owned()));
        }
        let preferred = *llvm.preferred.get_ref();
        if !verified.contains(&preferred) {
            let listed = verified.iter().map(LlvmMajor::to_string).collect::<Vec<_>>().join(", ");
            let message = format!("the preferred LLVM {preferred} is not among the verified ones ({listed})");
            return Err((llvm.preferred.span(), message));
        }

        let mut libnvvm = Vec::new();
        for release in self.libnvvm.map(|Table(libnvvm)| libnvvm.verified).unwrap_or_default() {
            let Some(found) = cuda_release(release.get_ref()) else {
                let message =
                    format!("expected a CUDA release such as `13.0`, found {:?}", release.get_ref());
                return Err((release.span(), message));
            };
            if libnvvm.contains(&found) {
                return Err((release.span(), format!("CUDA {found} is listed twice")));
            }
            libnvvm.push(found);
        }

        let mut cuda = Vec::new();
        for Table(wheel) in self.cuda {
            // They become words of pip's requirements: nothing else may hide in them.
            for word in [&wheel.package, &wheel.version, &wheel.target] {
                let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
                if !word.get_ref().starts_with(|c: char| c.is_ascii_alphanumeric())
                    || !word.get_ref().chars().all(plain)
                {
                    let message =
                        format!("expected letters, digits, `.`, `_` and `-`, found {:?}", word.get_ref());
                    return Err((word.span(), message));
                }
            }
            let (package, version) = (wheel.package.into_inner(), wheel.version.into_inner());
            cuda.push(CudaWheel {
                package,
                version,
                target: wheel.target.into_inner(),
                sha256: wheel.sha256,
            });
        }

        let mut models: Vec<Model> = Vec::new();
        for model in self.model {
            let span = model.span();
            let Table(model) = model.into_inner();
            if models.iter().any(|earlier| earlier.name == model.name) {
                return Err((span, format!("the model {} is listed twice", model.name)));
            }
            models.push(model);
        }

        let outputs = self.output.into_iter().map(|Table(output)| output).collect();
        Ok(Pin {
            models,
            outputs,
            cuda,
            source: self.source.0,
            patches,
            toolchain: self.toolchain.0,
            llvm: Llvm { preferred, verified },
            libnvvm,
            kernels: self.kernels.0,
        })
    }
}
