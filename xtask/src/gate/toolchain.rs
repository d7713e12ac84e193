//! Gates of the toolchain: they need the real backend, and no card.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use fs_err as fs;

use super::offline;
use super::scratch::{Extent, Scratch};
use super::{Defect, Gate, Need, Outcome, World, built, one_arch, refused, tail};
use crate::backend;
use crate::backend::checkout;
use crate::backend::host_config;
use crate::base::interrupt::Folder;
use crate::base::process;
use crate::build::gpu::{Built, GpuBuild};
use crate::build::recorded;
use crate::machine::arch::Arch;
use crate::machine::llc;
use crate::pins;
use crate::plan::{Plan, Request};
use crate::ptx::record::NOT_RECORDED;
use crate::report::error::Result;
use crate::report::progress::Silent;
use crate::source;
use crate::store::record;

const BACKEND: &[Need] = &[Need::Backend];

/// All of them.
pub fn gates(archs: &[Arch]) -> Vec<Gate> {
    let mut gates = vec![Gate::new(
        "toolchain/doctor",
        "every decision of the plan is good",
        BACKEND,
        "an empty store",
        doctor,
    )];
    gates.extend(archs.iter().copied().map(|arch| {
        Gate::new(
            format!("toolchain/build-{arch}"),
            "the device crates build, and their PTX is what was asked for",
            BACKEND,
            "PTX for another architecture",
            move |world, defect| build(world, arch, defect),
        )
    }));
    gates.extend([
        Gate::new(
            "toolchain/starts-without-driver",
            "the binary with CUDA starts without libcuda and passes its self-test on the CPU",
            BACKEND,
            "a self-test with a wrong order of additions",
            starts_without_driver,
        ),
        Gate::new(
            "toolchain/ptx-record",
            "the PTX is the one that PROVENANCE and kernels/ptx-table.toml record",
            BACKEND,
            "an entry whose recorded digest is another one",
            ptx_record,
        ),
        Gate::new(
            "toolchain/ptx-reproducible",
            "a second checkout in another folder, with another store, gives the same bytes of PTX",
            BACKEND,
            "one byte of the second PTX changed",
            ptx_reproducible,
        ),
        Gate::new(
            "toolchain/bundle-offline",
            "a bundle sets up a bare checkout without any network, and both engines build there",
            BACKEND,
            "one byte of the bundle changed",
            offline::bundle,
        ),
        Gate::new(
            "toolchain/refuses-swapped-backend",
            "a backend that setup did not build is refused",
            BACKEND,
            "the backend that setup built",
            refuses_swapped_backend,
        ),
        Gate::new(
            "toolchain/refuses-edited-source",
            "an edited source tree is refused",
            BACKEND,
            "the tree that setup published",
            refuses_edited_source,
        ),
        Gate::new(
            "toolchain/refuses-edited-patch",
            "a patch with other bytes than recorded is refused",
            BACKEND,
            "the patch as recorded",
            refuses_edited_patch,
        ),
        Gate::new(
            "toolchain/refuses-other-llc",
            "an llc of an unverified major is refused",
            BACKEND,
            "an llc of the verified major",
            refuses_other_llc,
        ),
        Gate::new(
            "toolchain/refuses-drifted-flags",
            "a host config that lacks a flag of Cargo's configuration is refused",
            BACKEND,
            "a host config that is up to date",
            refuses_drifted_flags,
        ),
    ]);
    gates
}

fn doctor(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    let empty = Folder::temporary("kiln-gate-")?;
    let seeded;
    let plan = match defect {
        Defect::None => world.plan(),
        Defect::Seeded => {
            let request = Request { store: Some(empty.path().to_owned()), ..world.request.clone() };
            seeded = Plan::resolve(&request, world.workspace, world.env);
            &seeded
        }
    };
    let bad: Vec<String> = plan
        .decisions()
        .iter()
        .filter_map(|decision| {
            let problem = decision.problem.as_ref()?;
            Some(format!("{}: [{}] {}", decision.subject, problem.code.id, problem.message))
        })
        .collect();
    if !bad.is_empty() {
        return Ok(Outcome::red(bad.join("\n")));
    }
    let loaded = backend::load(&plan.backend, &plan.rustc, world.env);
    Ok(match loaded.problem {
        Some(problem) => Outcome::red(format!("rustc does not load the backend: {}", problem.message)),
        None => Outcome::green(format!("{} decisions, and rustc loads the backend", plan.decisions().len())),
    })
}

fn build(world: &World<'_>, arch: Arch, defect: Defect) -> Result<Outcome> {
    let gpu = GpuBuild::prepare(world.plan(), &BTreeSet::from([arch]), world.env, &Silent)?;
    let built = gpu.build(&arch)?;
    if !built.binary.is_file() {
        return Ok(Outcome::red(format!("there is no {}", built.binary.display())));
    }
    let mut entries = 0;
    for (path, _) in &built.ptx {
        let mut text = fs::read_to_string(path)?;
        if defect == Defect::Seeded {
            text = text.replace(&format!(".target {arch}"), ".target sm_52");
        }
        entries += gpu.check(&arch, path, &text)?.entries.len();
    }
    Ok(Outcome::green(format!("{} PTX files, {entries} entries", built.ptx.len())))
}

/// The time that a self-test may take on a busy machine.
const SELFTEST_LIMIT: std::time::Duration = std::time::Duration::from_secs(600);

fn starts_without_driver(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    let built = built(world.plan(), one_arch(world)?, world)?;
    let mut command = std::process::Command::new(&built.binary);
    command.arg("selftest").stdin(Stdio::null());
    if defect == Defect::Seeded {
        command.args(["--seed-defect", "lane-order"]);
    }
    match process::output(&mut command, SELFTEST_LIMIT) {
        Ok(output) if output.status.success() => {
            Ok(Outcome::green(output.stdout.lines().last().unwrap_or("it succeeds").to_owned()))
        }
        Ok(output) => Ok(Outcome::red(format!(
            "{} selftest ended with {}\n{}{}",
            built.binary.display(),
            output.status,
            tail(&output.stdout),
            tail(&output.stderr)
        ))),
        Err(failure) => Ok(Outcome::red(format!("{} selftest: {failure:?}", built.binary.display()))),
    }
}

fn ptx_record(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    let compared = recorded::compare_builds(
        world.workspace,
        world.plan(),
        world.archs,
        defect == Defect::Seeded,
        world.env,
    );
    match compared {
        Ok(found) if found.is_empty() => Ok(Outcome::green("as recorded")),
        Ok(found) => Ok(Outcome::red(found.join("\n"))),
        // An architecture of the user's own choice need not be recorded.
        Err(error) if error.code() == &NOT_RECORDED => Ok(Outcome::Skipped {
            reason: error.message().to_owned(),
            run: error.hint_text().unwrap_or("cargo xtask ptx bless").trim_start_matches("run: ").to_owned(),
        }),
        Err(error) => Err(error),
    }
}

fn ptx_reproducible(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    let arch = one_arch(world)?;
    let first = texts(&built(world.plan(), arch, world)?)?;
    let scratch = Scratch::new(world, Extent::Whole)?;
    let mut second = texts(&built(&scratch.plan(None), arch, world)?)?;
    if defect == Defect::Seeded
        && let Some(byte) = second.values_mut().next().and_then(|bytes| bytes.last_mut())
    {
        *byte ^= 1;
    }
    let names: BTreeSet<_> = first.keys().chain(second.keys()).collect();
    let differ: Vec<_> = names.into_iter().filter(|name| first.get(*name) != second.get(*name)).collect();
    if !differ.is_empty() {
        return Ok(Outcome::red(format!("for {arch}, these differ: {differ:?}")));
    }
    let bytes: usize = first.values().map(Vec::len).sum();
    Ok(Outcome::green(format!("{} PTX files of {bytes} bytes for {arch}", first.len())))
}

/// Every PTX file's bytes by its name.
fn texts(built: &Built) -> Result<BTreeMap<std::ffi::OsString, Vec<u8>>> {
    let named = built.ptx.iter().map(|(path, _)| {
        let name = path.file_name().unwrap_or_default().to_owned();
        Ok((name, fs::read(path)?))
    });
    named.collect()
}

fn refuses_swapped_backend(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    let scratch = Scratch::new(world, Extent::Plan)?;
    if defect == Defect::None {
        let library = scratch.backend(world)?.library;
        fs::set_permissions(&library, std::fs::Permissions::from_mode(0o644))?;
        let mut file = fs::OpenOptions::new().read(true).write(true).open(&library)?;
        // The same length, one byte changed, and the time stamp of the original.
        let modified = file.metadata()?.modified()?;
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        std::io::Read::read_exact(&mut file, &mut last)?;
        file.seek(SeekFrom::End(-1))?;
        file.write_all(&[last[0] ^ 1])?;
        file.file().set_modified(modified)?;
    }
    Ok(refused(scratch.start(&BTreeSet::new(), None), &record::CHANGED))
}

fn refuses_edited_source(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    let scratch = Scratch::new(world, Extent::Plan)?;
    if defect == Defect::None {
        let pin = &world.plan().pins.require()?.pin;
        let tree = scratch.plan(None).source.require()?.tree.clone();
        append(&pin.source.lock.under(&pin.source.workspace(&tree)))?;
    }
    Ok(refused(scratch.start(&BTreeSet::new(), None), &source::CHANGED))
}

fn refuses_edited_patch(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    let scratch = Scratch::new(world, Extent::Plan)?;
    let Some(patch) = world.plan().pins.require()?.patches.first() else {
        return Ok(Outcome::red("PROVENANCE lists no patch that could be edited"));
    };
    if defect == Defect::None {
        append(&scratch.workspace.join(pins::PATCH_FOLDER).join(patch.file.as_str()))?;
    }
    Ok(refused(scratch.start(&BTreeSet::new(), None), &pins::PATCH_CHANGED))
}

fn append(path: &Path) -> Result<()> {
    fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))?;
    Ok(fs::OpenOptions::new().append(true).open(path)?.write_all(b"\n")?)
}

fn refuses_other_llc(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    let scratch = Scratch::new(world, Extent::Plan)?;
    if world.plan().by_libnvvm {
        return Ok(Outcome::Skipped {
            reason: "--llc libnvvm is given, and this is about llc".to_owned(),
            run: "cargo xtask gate toolchain/refuses-other-llc".to_owned(),
        });
    }
    let verified = world.plan().tools()?.llc.path.clone();
    let other = match defect {
        Defect::Seeded => verified,
        Defect::None => {
            // It says so of itself; its name stays the verified one's, which must not matter.
            let path: PathBuf = scratch.store.join(verified.file_name().unwrap_or_default());
            let banner = "LLVM version 99.1.0\n  Registered Targets:\n    nvptx64 - NVIDIA PTX 64-bit";
            fs::write(&path, format!("#!/bin/sh\ncat <<'E'\n{banner}\nE\n"))?;
            fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
            path
        }
    };
    Ok(refused(scratch.start(&BTreeSet::new(), Some(&other)), &llc::WRONG_MAJOR))
}

fn refuses_drifted_flags(world: &World<'_>, defect: Defect) -> Result<Outcome> {
    let scratch = Scratch::new(world, Extent::Plan)?;
    if defect == Defect::None {
        let path = checkout::host_config_path(&scratch.workspace);
        let mut config = scratch.plan(None).checkout.require()?.host_config.clone();
        config.extra_rustflags.push("--cfg=kiln_gate".to_owned());
        host_config::write(&path, &config)?;
    }
    Ok(refused(scratch.start(&BTreeSet::new(), None), &host_config::HOST_CONFIG_DRIFT))
}
