//! Verifying, rebuilding, bundling, pinning, listing and cleaning, end to end on a synthetic upstream that really
//! compiles and takes one crate of a registry. No network.

mod support;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use support::{World, finished};
use xtask::base::hash::Sha256;

/// A world whose upstream uses the crate `leftpad`, which only its own registry has.
fn world_with_a_crate(below: &str) -> World {
    let world = World::below(below);
    let archive = leftpad();
    let sum = Sha256::of(&archive);
    let registry = world.path("registry");
    fs::create_dir_all(registry.join("index/le/ft")).unwrap();
    let line = format!(
        r#"{{"name":"leftpad","vers":"1.0.0","deps":[],"cksum":"{sum}","features":{{}},"yanked":false}}"#
    );
    fs::write(registry.join("index/le/ft/leftpad"), line + "\n").unwrap();
    fs::write(registry.join("leftpad-1.0.0.crate"), &archive).unwrap();
    let config = format!(
        "[source.crates-io]\nreplace-with = \"local\"\n[source.local]\nlocal-registry = {:?}\n",
        registry.display().to_string()
    );
    fs::write(world.path("home/.cargo/config.toml"), config).unwrap();
    // Where Cargo keeps what it downloads; from a local registry it would not.
    fs::create_dir_all(world.path("home/.cargo/registry/cache/any")).unwrap();
    fs::write(world.path("home/.cargo/registry/cache/any/leftpad-1.0.0.crate"), &archive).unwrap();
    use_leftpad(&world, sum);
    world
}

fn use_leftpad(world: &World, sum: Sha256) {
    let manifest = world.path("upstream/crates/rustc-codegen-cuda/Cargo.toml");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text + "\n[dependencies]\nleftpad = \"1\"\n").unwrap();
    let lib = world.path("upstream/crates/rustc-codegen-cuda/src/lib.rs");
    let text = fs::read_to_string(&lib).unwrap();
    let padded = "\n/// Pads.\n#[unsafe(no_mangle)]\npub extern \"C\" fn padded(n: usize) -> usize {\n    leftpad::pad(n)\n}\n";
    fs::write(&lib, text + padded).unwrap();
    let lock = format!(
        "version = 4\n\n[[package]]\nname = \"cargo-oxide\"\nversion = \"0.0.1\"\n\n[[package]]\nname = \"leftpad\"\n\
         version = \"1.0.0\"\nsource = \"registry+https://github.com/rust-lang/crates.io-index\"\nchecksum = \"{sum}\"\n\n\
         [[package]]\nname = \"rustc_codegen_cuda\"\nversion = \"0.0.1\"\ndependencies = [\n \"leftpad\",\n]\n"
    );
    fs::write(world.path("upstream/Cargo.lock"), lock).unwrap();
    world.pin();
}

/// A crate whose code holds the path of its source, in the place of a panic.
fn leftpad() -> Vec<u8> {
    let manifest = "[package]\nname = \"leftpad\"\nversion = \"1.0.0\"\nedition = \"2024\"\n";
    let code =
        "//! Pads.\n/// Pads.\n#[inline(never)]\npub fn pad(n: usize) -> usize {\n    [1, 2, 3][n]\n}\n";
    archive(&[
        ("leftpad-1.0.0/Cargo.toml", manifest.as_bytes()),
        ("leftpad-1.0.0/src/lib.rs", code.as_bytes()),
    ])
}

fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    let mut tar = tar::Builder::new(gzip);
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        // Real crates name an owner, too, which root of a user namespace cannot set.
        header.set_uid(54_321);
        header.set_gid(54_321);
        tar.append_data(&mut header, name, *bytes).unwrap();
    }
    tar.into_inner().unwrap().finish().unwrap()
}

/// A world without registry, source or crates, for the same PROVENANCE as `of`.
fn empty_world(of: &World) -> World {
    let world = World::below("the/other/machine");
    fs::copy(of.path("work/PROVENANCE"), world.path("work/PROVENANCE")).unwrap();
    fs::remove_dir_all(world.path("upstream")).unwrap();
    world
}

/// Packs the files of a bundle again after `change`.
fn repack(bundle: &Path, change: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(bundle).unwrap();
    tar::Archive::new(flate2::read::GzDecoder::new(&*bytes)).unpack(folder.path()).unwrap();
    change(&folder.path().join("kiln-bundle"));
    let gzip = flate2::write::GzEncoder::new(fs::File::create(bundle).unwrap(), flate2::Compression::fast());
    let mut tar = tar::Builder::new(gzip);
    tar.follow_symlinks(false);
    tar.append_dir_all("kiln-bundle", folder.path().join("kiln-bundle")).unwrap();
    tar.into_inner().unwrap().finish().unwrap();
}

fn bundle(world: &World, arguments: &[&str]) -> PathBuf {
    let file = world.path("bundle.tar.gz");
    let mut all = vec!["bundle", "--offline", file.to_str().unwrap()];
    all.extend(arguments);
    world.run(&all).exits(0);
    file
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn verify_names_every_difference() {
    let world = World::new();
    world.setup();
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    let good = world.run(&["verify"]).exits(0);
    assert!(good.stdout.ends_with("comparisons, no difference\n"), "{}", good.stdout);
    assert_eq!(good.stderr, "");
    for named in ["cargo-oxide", "librustc_codegen_cuda.so", "patched tree", "0001-change.patch", "sm_86 PTX"]
    {
        assert!(good.stdout.contains(&format!("ok   {named}  ")), "{named} is missing in:\n{}", good.stdout);
    }
    world.run(&["verify", "--arch", "sm_90"]).exits(1);

    let ptx = ptx_of(&world, "sm_86");
    let original = fs::read_to_string(&ptx).unwrap();
    fs::write(&ptx, original.replace("add.rn", "sub.rn")).unwrap();
    let changed = world.run(&["verify"]).exits(70);
    assert!(changed.stdout.contains("DIFF sm_86 PTX\n       expected "), "{}", changed.stdout);
    let report = json(&world.run(&["verify", "--json"]).exits(70).stdout);
    assert_eq!(report["schema"], "kiln.verify/1");
    assert_eq!(report["ok"], false);
    // Cargo takes the file for fresh; build does not.
    let run = world.run(&["build", "--arch", "sm_86"]).exits(0);
    assert!(run.stderr.contains("was changed since it was built"), "{}", run.stderr);
    assert_eq!(fs::read_to_string(&ptx).unwrap(), original);
    world.run(&["verify"]).exits(0);

    fs::write(world.path("work/.cargo/cuda-oxide.toml"), "backend = \"/elsewhere\"\n").unwrap();
    assert!(world.run(&["verify"]).exits(70).stdout.contains("DIFF checkout"));
    world.setup();
    fs::write(world.backend().with_file_name("cargo-oxide"), "x").unwrap();
    let changed = world.run(&["verify"]).exits(70);
    assert!(
        changed.stdout.contains("DIFF backend") && changed.stdout.contains("[KILN-0911]"),
        "{}",
        changed.stdout
    );
}

fn ptx_of(world: &World, arch: &str) -> PathBuf {
    let folders = fs::read_dir(world.path(&format!("work/target/device/{arch}"))).unwrap();
    let folders = folders.map(|entry| entry.unwrap().path());
    folders.map(|folder| folder.join("kiln_device.ptx")).find(|path| path.is_file()).unwrap()
}

#[test]
fn a_rebuild_elsewhere_gives_the_same_bytes() {
    let world = world_with_a_crate("");
    world.setup();
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    let run = world.run(&["verify", "--rebuild", "--offline", "--arch", "sm_86"]).exits(0);
    for named in ["librustc_codegen_cuda.so again", "cargo-oxide again", "kiln_device.ptx again"] {
        assert!(run.stdout.contains(&format!("ok   {named}  ")), "{}", run.stdout);
    }
    assert_eq!(fs::read_dir(world.path("store/build")).unwrap().count(), 0, "leftovers");
}

#[test]
fn a_backend_that_a_rebuild_does_not_give_is_shown_by_section() {
    let world = world_with_a_crate("");
    world.setup();
    // Forged together with its record, so that only building again can tell.
    let library = world.backend();
    let mut bytes = fs::read(&library).unwrap();
    let place = bytes.windows(13).position(|window| window == b"/kiln/crates/").unwrap();
    bytes[place + 1] = b'K';
    let old = Sha256::of(&fs::read(&library).unwrap()).to_string();
    fs::write(&library, &bytes).unwrap();
    let record = library.with_file_name("record.json");
    let text = fs::read_to_string(&record).unwrap().replace(&old, &Sha256::of(&bytes).to_string());
    fs::write(&record, text).unwrap();
    world.run(&["verify"]).exits(0);
    let run = world.run(&["verify", "--rebuild", "--offline"]).exits(70);
    assert!(run.stdout.contains("DIFF librustc_codegen_cuda.so again"), "{}", run.stdout);
    assert!(run.stdout.contains("section .rodata: 1 bytes differ"), "{}", run.stdout);
}

#[test]
fn a_bundle_has_the_same_bytes_from_two_places_and_sets_up_a_third_without_network() {
    let (one, two) = (world_with_a_crate(""), world_with_a_crate("another/place"));
    one.setup();
    two.setup();
    let (first, second) = (bundle(&one, &[]), bundle(&two, &[]));
    let bytes = fs::read(&first).unwrap();
    assert!(bytes == fs::read(&second).unwrap(), "the bundles differ");
    assert!(bytes == fs::read(bundle(&one, &[])).unwrap(), "the second bundle differs");

    let third = empty_world(&one);
    let run = third.run(&["setup", "--bundle", first.to_str().unwrap()]).exits(0);
    assert!(run.stderr.contains("verifying and unpacking 1 crates"), "{}", run.stderr);
    assert!(fs::read(one.backend()).unwrap() == fs::read(third.backend()).unwrap(), "the backends differ");
    let again = third.run(&["setup", "--bundle", first.to_str().unwrap()]).exits(0);
    assert_eq!(again.stdout, "setup: everything is in place, nothing was done\n");
    third.run(&["build", "--arch", "sm_86"]).exits(0);
    let verified = third.run(&["verify", "--rebuild", "--offline"]).exits(0);
    assert!(verified.stdout.contains("ok   vendored crates  "), "{}", verified.stdout);
    // A bundle of what a bundle made is the same again.
    assert!(bytes == fs::read(bundle(&third, &[])).unwrap(), "the third bundle differs");
}

#[test]
fn the_bootstrap_of_a_bundle_serves_cargo_without_network_and_as_root_of_a_namespace() {
    let world = world_with_a_crate("");
    world.setup();
    let file = bundle(&world, &[]);
    let place = world.path("a place");
    fs::create_dir(&place).unwrap();
    let project = world.path("project");
    fs::create_dir_all(project.join("src")).unwrap();
    fs::write(project.join("src/main.rs"), "fn main() { assert_eq!(leftpad::pad(1), 2) }\n").unwrap();
    let manifest = "[package]\nname = \"project\"\nversion = \"1.0.0\"\nedition = \"2024\"\n[dependencies]\nleftpad = \"1\"\n[workspace]\n";
    fs::write(project.join("Cargo.toml"), manifest).unwrap();
    let lock = fs::read_to_string(world.path("upstream/Cargo.lock")).unwrap();
    let sum = lock.lines().find(|line| line.starts_with("checksum")).unwrap();
    let lock = format!(
        "version = 4\n\n[[package]]\nname = \"leftpad\"\nversion = \"1.0.0\"\nsource = \"registry+https://github.com/rust-lang/crates.io-index\"\n\
         {sum}\n\n[[package]]\nname = \"project\"\nversion = \"1.0.0\"\ndependencies = [\n \"leftpad\",\n]\n"
    );
    fs::write(project.join("Cargo.lock"), lock).unwrap();
    let script = "set -e; tar -xzf \"$1\" -C \"$2\"; sh \"$2/kiln-bundle/bootstrap.sh\"; \
                  cargo --config \"$2/kiln-bundle/cargo.toml\" run --quiet --locked";
    let mut command = if support::has_network_namespaces() {
        let mut command = std::process::Command::new("unshare");
        command.args(["-rn", "sh"]);
        command
    } else {
        support::skipped(
            "bootstrap",
            "not without network: no network namespace can be made here (unshare -rn)",
        );
        std::process::Command::new("sh")
    };
    command.args(["-c", script, "sh"]).arg(&file).arg(&place).current_dir(&project).env_clear();
    let search = std::env::join_paths([world.path("sysroot/bin"), "/usr/bin".into(), "/bin".into()]).unwrap();
    fs::create_dir(world.path("another home")).unwrap();
    command.env("PATH", search).env("HOME", world.path("another home"));
    let run = finished(command.output().unwrap()).exits(0);
    assert!(run.stdout.contains("kiln-bundle/cargo.toml xtask setup --bundle BUNDLE\n"), "{}", run.stdout);
}

#[test]
fn a_bundle_is_not_trusted() {
    let world = world_with_a_crate("");
    world.setup();
    let file = bundle(&world, &[]);
    let original = fs::read(&file).unwrap();
    let other = empty_world(&world);
    let name = file.to_str().unwrap();
    let run = |arguments: &[&str]| other.run(&[&["setup", "--bundle", name], arguments].concat());

    let path = |folder: &Path, name: &str| folder.join(name);
    repack(&file, |folder| fs::write(path(folder, "archives/leftpad-1.0.0.crate"), "x").unwrap());
    run(&[]).exits(70).says("error[KILN-0923]").says("leftpad-1.0.0.crate");
    fs::write(&file, &original).unwrap();
    repack(&file, |folder| fs::remove_file(path(folder, "archives/leftpad-1.0.0.crate")).unwrap());
    run(&[]).exits(1).says("error[KILN-0922]");
    let other = empty_world(&world);
    let run = |arguments: &[&str]| other.run(&[&["setup", "--bundle", name], arguments].concat());
    fs::write(&file, &original).unwrap();
    repack(&file, |folder| fs::write(path(folder, "source/Cargo.toml"), "[workspace]\n").unwrap());
    run(&[]).exits(70).says("error[KILN-0384]");
    repack(&file, |folder| fs::remove_file(path(folder, "kiln-bundle.json")).unwrap());
    run(&[]).exits(1).says("error[KILN-0250]");
    fs::write(&file, &original[..original.len() / 2]).unwrap();
    run(&[]).exits(1);
    fs::write(&file, &original).unwrap();
    run(&["--bundle-sha256", &"0".repeat(64)]).exits(70).says("error[KILN-0252]");
    run(&[]).exits(0);
}

#[test]
fn a_backend_in_a_bundle_is_used_only_with_the_sha256_of_the_bundle() {
    let world = world_with_a_crate("");
    world.setup();
    let file = bundle(&world, &["--with-backend"]);
    let name = file.to_str().unwrap();
    let without = empty_world(&world);
    let run = without.run(&["setup", "--bundle", name]).exits(0);
    run.says("the bundle's backend is not used").says("building rustc_codegen_cuda");

    let sum = Sha256::of(&fs::read(&file).unwrap()).to_string();
    let with = empty_world(&world);
    let run = with.run(&["setup", "--bundle", name, "--bundle-sha256", &sum]).exits(0);
    assert!(run.stderr.contains("load check") && !run.stderr.contains("building"), "{}", run.stderr);
    assert!(fs::read(world.backend()).unwrap() == fs::read(with.backend()).unwrap());
    with.run(&["verify", "--rebuild", "--offline"]).exits(0);
}

#[test]
fn gc_keeps_what_a_checkout_uses_and_takes_the_rest() {
    let world = World::new();
    world.setup();
    let all = world.run(&["store"]).exits(0);
    assert_eq!(all.stdout.matches("used   ").count(), 3, "{}", all.stdout);
    assert_eq!(
        all.stdout
            .matches(&format!("used by {}", fs::canonicalize(world.path("work")).unwrap().display()))
            .count(),
        3
    );
    assert_eq!(world.run(&["gc"]).exits(0).stdout.lines().count(), 1);

    // What killed setups leave, and what is not ours.
    let key = "0123456789abcdef0123456789abcdef";
    for folder in [format!("sources/.staging-{key}-x"), format!("build/{key}"), "build/.verify-x".to_owned()]
    {
        fs::create_dir_all(world.path(&format!("store/{folder}/a"))).unwrap();
    }
    fs::create_dir_all(world.path("store/sources/mine")).unwrap();
    fs::create_dir_all(world.path("store/downloads")).unwrap();
    fs::write(world.path("store/downloads/x.tar.gz.part"), "part").unwrap();
    let dry = world.run(&["gc", "--dry-run"]).exits(0);
    assert_eq!(dry.stdout.matches("leftover").count(), 4, "{}", dry.stdout);
    assert!(world.path("store/build/.verify-x").exists());
    world.run(&["gc"]).exits(0);
    for gone in ["build/.verify-x", "downloads/x.tar.gz.part"] {
        assert!(!world.path(&format!("store/{gone}")).exists(), "{gone}");
    }
    assert!(!world.path(&format!("store/build/{key}")).exists());
    assert!(world.path("store/sources/mine").exists(), "gc took what is not kiln's");
    world.run(&["build", "--arch", "sm_86"]).exits(0);

    // The checkout moves on to other patches: the old entries are let go.
    let old = world.backend();
    let patch = world.path("work/backend-patches/0001-change.patch");
    let edited =
        fs::read_to_string(&patch).unwrap().replace(" /// Exported", "+// Another line.\n /// Exported");
    fs::write(&patch, edited.replace("-1,7 +1,5", "-1,7 +1,6")).unwrap();
    world.pin();
    world.run(&["setup", "--offline"]).exits(0);
    assert!(world.run(&["gc", "--keep-days", "1"]).exits(0).stdout.starts_with("freed 0 B"));
    let report = json(&world.run(&["gc", "--json"]).exits(0).stdout);
    assert_eq!(report["schema"], "kiln.gc/1");
    assert_eq!(report["removed"].as_array().unwrap().len(), 2, "{report}");
    assert!(!old.exists());
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn gc_lets_go_of_a_checkout_that_is_gone_and_spares_an_entry_in_work() {
    let world = World::new();
    world.setup();
    fs::rename(world.path("work/.cargo/kiln.toml"), world.path("kiln.toml")).unwrap();
    // Another process, such as a setup, works on the backend.
    let name = world.backend().parent().unwrap().file_name().unwrap().to_string_lossy().into_owned();
    let lock = fs::File::create(world.path(&format!("store/locks/backend-{name}.lock"))).unwrap();
    lock.lock().unwrap();
    let run = world.run(&["gc"]).exits(0);
    assert!(run.stdout.contains("kept: a setup works on it"), "{}", run.stdout);
    assert!(world.backend().is_file());
    assert_eq!(fs::read_dir(world.path("store/sources")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(world.path("store/roots")).unwrap().count(), 0);
    drop(lock);
    world.run(&["gc"]).exits(0);
    assert_eq!(fs::read_dir(world.path("store/backends")).unwrap().count(), 0);
    world.setup();
}

#[test]
fn a_damaged_note_of_a_checkout_stops_gc() {
    let world = World::new();
    world.setup();
    let note = fs::read_dir(world.path("store/roots")).unwrap().next().unwrap().unwrap().path();
    fs::write(&note, "{").unwrap();
    world.run(&["gc"]).exits(1).says("error[KILN-0907]");
    assert!(world.backend().is_file());
    world.setup();
    world.run(&["gc"]).exits(0);
    assert!(world.backend().is_file());
}

#[test]
fn the_attestation_is_an_in_toto_statement_with_slsa_provenance() {
    let world = World::new();
    world.run(&["attest"]).exits(1).says("error[KILN-0910]");
    world.setup();
    let run = world.run(&["attest"]).exits(0);
    let statement = json(&run.stdout);
    assert_eq!(json(&world.run(&["attest", "--json"]).exits(0).stdout), statement);

    // https://in-toto.io/Statement/v1
    assert_eq!(keys(&statement), ["_type", "predicate", "predicateType", "subject"]);
    assert_eq!(statement["_type"], "https://in-toto.io/Statement/v1");
    assert_eq!(statement["predicateType"], "https://slsa.dev/provenance/v1");
    let subjects = statement["subject"].as_array().unwrap();
    assert_eq!(subjects.len(), 2);
    for subject in subjects {
        let name = subject["name"].as_str().unwrap();
        let found = Sha256::of(&fs::read(world.backend().with_file_name(name)).unwrap());
        assert_eq!(subject["digest"]["sha256"], found.to_string());
    }
    // https://slsa.dev/spec/v1.0/provenance
    let predicate = &statement["predicate"];
    assert_eq!(keys(predicate), ["buildDefinition", "runDetails"]);
    let definition = &predicate["buildDefinition"];
    assert_eq!(
        keys(definition),
        ["buildType", "externalParameters", "internalParameters", "resolvedDependencies"]
    );
    assert_eq!(definition["buildType"], "urn:kiln:build:backend:v1");
    assert!(definition["externalParameters"].is_object() && definition["internalParameters"].is_object());
    for dependency in definition["resolvedDependencies"].as_array().unwrap() {
        let digests = dependency["digest"].as_object().unwrap();
        assert!(!digests.is_empty() && digests.values().all(Value::is_string), "{dependency}");
        assert!(dependency["name"].is_string() || dependency["uri"].is_string(), "{dependency}");
    }
    let run = &predicate["runDetails"];
    assert_eq!(keys(run), ["builder", "byproducts", "metadata"]);
    assert!(run["builder"]["id"].as_str().unwrap().contains(':'), "a type URI");
    for time in ["startedOn", "finishedOn"] {
        let time = run["metadata"][time].as_str().unwrap();
        let form: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(form, "0000-00-00T00:00:00Z");
    }
}

/// The keys of an object, sorted: whether serde_json keeps their order depends on what else is built with it.
fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

const NEXT: &str = "89abcdef0123456789abcdef0123456789abcdef";

#[test]
fn pin_finds_moved_crates_and_keeps_comments() {
    let world = World::new();
    let provenance = world.path("work/PROVENANCE");
    let text = fs::read_to_string(&provenance).unwrap();
    let text = text.replace("revision =", "# why this one\nrevision =").replace("[llvm]", "# llvm\n[llvm]");
    fs::write(&provenance, &text).unwrap();
    let next = world.path("next");
    fs::create_dir(&next).unwrap();
    fs::rename(world.path("upstream"), next.join("cuda-oxide")).unwrap();
    let next = next.display().to_string();

    let run = world.run(&["pin", NEXT, "--source", &next]).exits(0);
    assert!(run.stdout.contains("patch     0001-change.patch: applies\n"), "{}", run.stdout);
    assert!(
        run.stdout.contains("change    source.subfolder\n        - (nothing)\n        + cuda-oxide\n"),
        "{}",
        run.stdout
    );
    assert!(run.stdout.ends_with("PROVENANCE was not written: --write does\n"), "{}", run.stdout);
    assert_eq!(fs::read_to_string(&provenance).unwrap(), text);

    world.run(&["pin", NEXT, "--source", &next, "--write"]).exits(0);
    let written = fs::read_to_string(&provenance).unwrap();
    assert!(written.contains(&format!("# why this one\nrevision = \"{NEXT}\"")), "{written}");
    assert!(
        written.contains("subfolder = \"cuda-oxide\"") && written.contains("\n# llvm\n[llvm]"),
        "{written}"
    );
    world.run(&["setup", "--offline", "--source", &next]).exits(0);
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    let check = world.run(&["pin", "--check", "--source", &next]).exits(0);
    assert!(check.stdout.contains("note      the pin resolves"), "{}", check.stdout);
    fs::write(world.path("next/README"), "another").unwrap();
    let check = world.run(&["pin", "--check", "--source", &next]).exits(70);
    assert!(check.stdout.contains("change    source.tree\n"), "{}", check.stdout);
}

#[test]
fn pin_shows_the_hunk_of_a_patch_that_conflicts_and_writes_nothing() {
    let world = World::new();
    let lib = world.path("upstream/crates/rustc-codegen-cuda/src/lib.rs");
    let upstream = world.path("upstream").display().to_string();
    let before = fs::read_to_string(world.path("work/PROVENANCE")).unwrap();
    let original = fs::read_to_string(&lib).unwrap();
    fs::write(&lib, format!("// A new first line.\n{original}")).unwrap();
    let run = world.run(&["pin", NEXT, "--source", &upstream]).exits(1);
    assert!(
        run.stdout.contains("patch     0001-change.patch: conflicts\n          0001-change.patch"),
        "{}",
        run.stdout
    );
    world.run(&["pin", NEXT, "--source", &upstream, "--write"]).exits(1).says("error[KILN-0262]");
    assert_eq!(fs::read_to_string(world.path("work/PROVENANCE")).unwrap(), before);

    fs::write(&lib, original).unwrap();
    let patch = fs::read(world.path("work/backend-patches/0001-change.patch")).unwrap();
    xtask::source::patch::Patch::parse("p", &patch).unwrap().apply(&world.path("upstream")).unwrap();
    let report = json(&world.run(&["pin", NEXT, "--source", &upstream, "--json"]).exits(1).stdout);
    assert_eq!(report["schema"], "kiln.pin/1");
    assert_eq!(report["patches"][0]["verdict"], "upstream");
    assert!(report["rust"][0].as_str().unwrap().starts_with("rust-toolchain.toml: "), "{report}");
}

#[test]
fn pin_takes_the_patches_that_were_made_for_a_revision() {
    let world = World::new();
    world.setup();
    let lib = world.path("upstream/crates/rustc-codegen-cuda/src/lib.rs");
    let upstream = world.path("upstream").display().to_string();
    let original = fs::read_to_string(&lib).unwrap();
    fs::write(
        &lib,
        original.replace(
            "compile_error!(\"the carried patch removes this line\");",
            "compile_error!(\"moved\");",
        ),
    )
    .unwrap();
    let carried = world.path("work/backend-patches/0001-change.patch");
    let old = fs::read_to_string(&carried).unwrap();
    let (pin, next) = (world.path("work/PROVENANCE"), &NEXT[..12]);
    let before = fs::read_to_string(&pin).unwrap();
    world.run(&["pin", NEXT, "--source", &upstream]).exits(1);

    // Made anew, under another name: it is tried, and nothing else changes.
    let folder = world.path("work/backend-patches").join(next);
    fs::create_dir(&folder).unwrap();
    let new = old.replace("the carried patch removes this line", "moved");
    fs::write(folder.join("0002-moved.patch"), &new).unwrap();
    let run = world.run(&["pin", NEXT, "--source", &upstream]).exits(0);
    assert!(run.stdout.contains("patch     0002-moved.patch: applies"), "{}", run.stdout);
    assert!(run.stdout.contains("change    patch.0001-change.patch"), "{}", run.stdout);
    assert_eq!(fs::read_to_string(&pin).unwrap(), before);
    world.run(&["build", "--arch", "sm_86"]).exits(0);

    // Written: they are the carried ones.
    world.run(&["pin", NEXT, "--source", &upstream, "--write"]).exits(0);
    assert!(!folder.exists() && !carried.exists());
    assert_eq!(fs::read_to_string(world.path("work/backend-patches/0002-moved.patch")).unwrap(), new);
    let after = fs::read_to_string(&pin).unwrap();
    assert!(after.contains("0002-moved.patch") && !after.contains("0001-change.patch"), "{after}");
    world.setup();
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn pin_records_edited_new_and_removed_patches() {
    let world = World::new();
    world.setup();
    let patch = world.path("work/backend-patches/0001-change.patch");
    let edited =
        fs::read_to_string(&patch).unwrap().replace(" /// Exported", "+// Another line.\n /// Exported");
    fs::write(&patch, edited.replace("-1,7 +1,5", "-1,7 +1,6")).unwrap();
    let new = "Subject: [PATCH] Add a file\n\ndiff --git a/NEW b/NEW\nnew file mode 100644\n--- /dev/null\n+++ b/NEW\n@@ -0,0 +1 @@\n+new\n";
    fs::write(world.path("work/backend-patches/0002-new.patch"), new).unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(70).says("cargo xtask pin --patches --write");
    let shown = world.run(&["pin", "--patches"]).exits(0);
    assert!(
        shown.stdout.contains("change    patch.0002-new.patch\n        - (nothing)\n"),
        "{}",
        shown.stdout
    );
    world.run(&["pin", "--patches", "--write"]).exits(0);
    let written = fs::read_to_string(world.path("work/PROVENANCE")).unwrap();
    assert!(
        written.contains("reason = \"a test\"") && written.contains("reason = \"Add a file\""),
        "{written}"
    );
    world.run(&["setup", "--offline"]).exits(0);

    fs::remove_file(world.path("work/backend-patches/0002-new.patch")).unwrap();
    world.run(&["pin", "--patches", "--write"]).exits(0);
    assert!(!fs::read_to_string(world.path("work/PROVENANCE")).unwrap().contains("0002"));
    world.run(&["setup", "--offline"]).exits(0);
}

/// Runs git in `folder` and returns what it prints.
fn git(folder: &Path, arguments: &[&str]) -> String {
    let mut command = std::process::Command::new("git");
    command.arg("-C").arg(folder).args(["-c", "user.name=T", "-c", "user.email=t@example.invalid"]);
    let output = command.args(arguments).env("GIT_CONFIG_GLOBAL", "/dev/null").output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn pin_takes_the_latest_revision_of_a_repository_and_says_what_an_incomplete_one_lacks() {
    let world = World::new();
    let upstream = world.path("upstream");
    git(&upstream, &["init", "--quiet", "--initial-branch=trunk"]);
    let commit = |message: &str| {
        git(&upstream, &["add", "--all", "--force"]);
        git(&upstream, &["commit", "--quiet", "--message", message]);
        git(&upstream, &["rev-parse", "HEAD"])
    };
    let first = commit("first");
    fs::write(upstream.join("NEWS"), "something else\n").unwrap();
    let second = commit("second");
    let provenance = fs::read_to_string(world.path("work/PROVENANCE")).unwrap();
    let from = upstream.display().to_string();

    let dry = world.run(&["pin", "--upstream-latest", "--source", &from]).exits(0);
    assert!(dry.stdout.starts_with(&format!("revision  {second}\n")), "{}", dry.stdout);
    assert!(dry.stdout.ends_with("PROVENANCE was not written: --write does\n"), "{}", dry.stdout);
    // A branch, a short name and an older commit are resolved, too.
    for name in ["trunk", &second[..9]] {
        let run = world.run(&["pin", name, "--source", &from]).exits(0);
        assert!(run.stdout.starts_with(&format!("revision  {second}\n")), "{}", run.stdout);
    }
    let older = world.run(&["pin", "trunk~1", "--source", &from]).exits(0);
    assert!(older.stdout.starts_with(&format!("revision  {first}\n")), "{}", older.stdout);

    // A copy without all files, as a partial clone is.
    let blob = git(&upstream, &["rev-parse", "HEAD:NEWS"]);
    let object = upstream.join(".git/objects").join(&blob[..2]).join(&blob[2..]);
    let bytes = fs::read(&object).unwrap();
    fs::remove_file(&object).unwrap();
    let run = world.run(&["pin", "--upstream-latest", "--source", &from]).exits(1);
    run.says("error[KILN-0383]").says(&blob).says("fetch --refetch https://example.invalid/upstream");
    fs::write(&object, bytes).unwrap();

    // A revision whose crates are gone or have another name.
    fs::remove_dir_all(upstream.join("crates/cargo-oxide")).unwrap();
    commit("third");
    world.run(&["pin", "--upstream-latest", "--source", &from, "--write"]).exits(1).says("cargo-oxide");
    git(&upstream, &["reset", "--quiet", "--hard", &second]);
    assert_eq!(fs::read_to_string(world.path("work/PROVENANCE")).unwrap(), provenance, "a dry run wrote");

    world.run(&["pin", "--upstream-latest", "--source", &from, "--write"]).exits(0);
    let written = fs::read_to_string(world.path("work/PROVENANCE")).unwrap();
    assert!(written.contains(&format!("revision = \"{second}\"")), "{written}");
    world.run(&["setup", "--offline", "--source", &from]).exits(0);
    world.run(&["pin", "--check", "--source", &from]).exits(0);
}

#[test]
fn pin_needs_something_to_do_and_a_revision_that_exists() {
    let world = World::new();
    world.run(&["pin"]).exits(1);
    let upstream = world.path("upstream").display().to_string();
    world.run(&["pin", "main", "--source", &upstream]).exits(1).says("error[KILN-0261]");
    // Asking the repository would be a use of the network.
    for asked in ["--upstream-latest", "main"] {
        world.run(&["pin", asked, "--offline"]).exits(1).says("--offline forbids to ask it");
        let mut command = world.command(&["pin", asked]);
        let run = finished(command.env("KILN_OFFLINE", "1").output().unwrap());
        run.exits(1).says("--offline forbids to ask it");
    }
    let empty = world.path("empty");
    fs::create_dir(&empty).unwrap();
    let run = world.run(&["pin", NEXT, "--source", empty.to_str().unwrap()]);
    run.exits(1).says("error[KILN-0260]");
}

#[test]
fn every_new_verb_has_help() {
    let world = World::new();
    for verb in ["verify", "bundle", "pin", "store", "gc", "attest"] {
        let run = finished(world.command(&[verb, "--help"]).output().unwrap()).exits(0);
        for option in ["--store", "--json"] {
            assert!(run.stdout.contains(option), "{verb} lacks {option}");
        }
    }
}

#[test]
fn cuda_wheels_are_laid_verified_and_found() {
    let world = World::new();
    // No toolkit by any variable, and none of this machine.
    let wheel = wheel(&[
        (
            "nvidia/cu13/include/cuda.h",
            "#define CUDA_VERSION 13000\nCUresult CUDAAPI cuInit(unsigned int);\n",
        ),
        ("nvidia/cu13/bin/ptxas", "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"),
        ("nvidia/cu13/bin/nvcc", "not needed"),
        ("nvidia/cu13/lib/libnvvm.so.4", "nvvm"),
        ("parts-1.0.dist-info/METADATA", "Name: parts\nLicense-Expression: LicenseRef-Theirs\n\ntext\n"),
    ]);
    let sum = Sha256::of(&wheel);
    fs::write(world.path("parts.whl"), &wheel).unwrap();
    let provenance = world.path("work/PROVENANCE");
    let target = xtask::source::cuda_wheels::target();
    let table = format!(
        "\n[[cuda]]\npackage = \"parts\"\nversion = \"1.0\"\ntarget = \"{target}\"\nsha256 = \"{sum}\"\n"
    );
    let text = fs::read_to_string(&provenance).unwrap();
    fs::write(&provenance, text.clone() + &table).unwrap();
    // Stands in for pip: checks what it is asked, and copies the file.
    let pip = format!(
        "#!/bin/sh\necho \"$@\" > '{0}/asked'\nwhile [ $# -gt 0 ]; do case $1 in -d) to=$2 ;; -r) grep -q 'parts==1.0 --hash=sha256:{sum}' \"$2\" || exit 9 ;; esac; shift; done\nmkdir -p \"$to\" && cp '{0}/parts.whl' \"$to/parts-1.0.whl\"\n",
        world.path("").display()
    );
    world.script("bin/python3", &pip);
    let upstream = world.path("upstream").display().to_string();
    let run = |arguments: &[&str]| {
        let mut command = world.command(arguments);
        command.env_remove("CUDA_TOOLKIT_PATH");
        finished(command.output().unwrap())
    };
    let setup = ["setup", "--offline", "--source", &upstream, "--cuda", "wheels"];

    fs::write(world.path("parts.whl"), "another").unwrap();
    run(&setup).exits(70).says("error[KILN-0347]").says("parts 1.0 has not the pinned sha256");
    fs::write(world.path("parts.whl"), &wheel).unwrap();
    let first = run(&setup).exits(0);
    assert!(
        first.stdout.contains("licence   NVIDIA's CUDA Toolkit: LicenseRef-Theirs\n"),
        "{}",
        first.stdout
    );
    let asked = fs::read_to_string(world.path("asked")).unwrap();
    for option in ["--no-deps", "--require-hashes", "--no-index"] {
        assert!(asked.contains(option), "{asked}");
    }
    assert_eq!(run(&setup).exits(0).stdout, "setup: everything is in place, nothing was done\n");
    let doctor = run(&["doctor"]).exits(0);
    assert!(doctor.stdout.contains("the store (setup --cuda wheels)): chosen"), "{}", doctor.stdout);
    run(&["build", "--arch", "sm_86"]).exits(0);

    let root =
        fs::read_dir(world.path("store/cuda")).unwrap().next().unwrap().unwrap().path().join("toolkit");
    assert!(root.join("lib64/stubs/libcuda.so").is_file() && root.join("nvvm/lib64/libnvvm.so").is_file());
    assert!(!root.join("bin/nvcc").exists());
    run(&["verify"]).exits(0);
    run(&["gc"]).exits(0);
    fs::write(root.join("include/cuda.h"), "#define CUDA_VERSION 13000\n").unwrap();
    assert!(run(&["verify"]).exits(70).stdout.contains("[KILN-0350]"));

    fs::write(&provenance, text).unwrap();
    run(&setup).exits(1).says("error[KILN-0345]");
}

fn wheel(files: &[(&str, &str)]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, text) in files {
        writer.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
        writer.write_all(text.as_bytes()).unwrap();
    }
    writer.finish().unwrap().into_inner()
}
