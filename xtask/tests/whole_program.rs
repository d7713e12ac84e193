//! The verbs end to end, on a synthetic upstream that really compiles. No network, no GPU, no LLVM.

mod support;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::Stdio;

use support::{World, finished, llvm_tool};

#[test]
fn setup_then_doctor_then_build_and_a_second_setup_does_nothing() {
    let world = World::new();
    let bare = world.run(&["doctor"]).exits(1);
    assert!(
        bare.stdout.contains("[KILN-0389]") && bare.stdout.contains("cargo xtask setup"),
        "{}",
        bare.stdout
    );
    assert!(!world.path("store").exists(), "doctor wrote something");

    let first = world.setup();
    assert!(first.stdout.contains("next      cargo xtask build --arch sm_NN"), "{}", first.stdout);
    let second = world.setup();
    assert_eq!(second.stdout, "setup: everything is in place, nothing was done\n");
    assert_eq!(second.stderr, "");

    let doctor = world.run(&["doctor", "--arch", "sm_86"]).exits(0);
    assert!(
        doctor.stdout.ends_with("ready: `cargo xtask build --arch sm_NN` would start\n"),
        "{}",
        doctor.stdout
    );
    let built = world.run(&["build", "--arch", "sm_86", "--arch", "sm_90"]).exits(0);
    for arch in ["sm_86", "sm_90"] {
        assert!(built.stdout.contains(&format!(".target {arch}, 1 entries")), "{}", built.stdout);
    }
}

#[test]
fn setup_says_what_it_would_do_and_does_nothing() {
    let world = World::new();
    let upstream = world.path("upstream").display().to_string();
    let run = world.run(&["setup", "--dry-run", "--source", &upstream]).exits(0);
    let verbs: Vec<_> =
        run.stdout.lines().map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(verbs, ["would take", "would build", "would write"]);
    assert!(!world.path("store").exists() && !world.path("work/.cargo/cuda-oxide.toml").exists());
}

#[test]
fn g6_offline_without_a_source_names_what_is_missing() {
    let world = World::new();
    let run = world.run(&["setup", "--offline"]).exits(1);
    run.says("error[KILN-0380]").says("hint: give the revision with --source");
}

#[test]
fn b2_a_swapped_backend_is_refused_until_setup_mends_it() {
    let world = World::new();
    world.setup();
    fs::write(world.backend(), "another library").unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(70).says("error[KILN-0911]").says("recorded: ");
    assert!(world.run(&["doctor"]).exits(70).stdout.contains("[KILN-0911]"));
    world.setup();
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn b1_an_old_time_stamp_or_a_new_one_decides_nothing() {
    let world = World::new();
    world.setup();
    let backend = fs::File::options().append(true).open(world.backend()).unwrap();
    for time in [std::time::SystemTime::UNIX_EPOCH, std::time::SystemTime::now()] {
        backend.set_modified(time).unwrap();
        assert_eq!(world.setup().stdout, "setup: everything is in place, nothing was done\n");
    }
}

#[test]
fn b2_an_edited_patch_is_refused_and_a_recorded_one_makes_another_backend() {
    let world = World::new();
    world.setup();
    let first = world.backend();
    let patch = world.path("work/backend-patches/0001-change.patch");
    let edited =
        fs::read_to_string(&patch).unwrap().replace(" /// Exported", "+// Another line.\n /// Exported");
    let edited = edited.replace("-1,7 +1,5", "-1,7 +1,6");
    fs::write(&patch, edited).unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(70).says("error[KILN-0205]");
    world.run(&["setup"]).exits(70).says("error[KILN-0205]");

    world.pin();
    world.run(&["build", "--arch", "sm_86"]).exits(1).says("error[KILN-0389]");
    // The pristine tree is in the store: no source is needed any more.
    world.run(&["setup", "--offline"]).exits(0);
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    assert!(first.is_file(), "the other patch set keeps its own entry");
}

#[test]
fn a_changed_source_in_the_store_is_refused_and_mended() {
    let world = World::new();
    world.setup();
    let entry = fs::read_dir(world.path("store/sources")).unwrap().next().unwrap().unwrap().path();
    let file = entry.join("tree/crates/cargo-oxide/src/main.rs");
    fs::write(&file, "fn main() {}").unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(70).says("error[KILN-0388]");
    world.run(&["setup", "--offline"]).exits(0);
    assert_ne!(fs::read_to_string(&file).unwrap(), "fn main() {}");
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn another_tree_is_refused_by_its_hash() {
    let world = World::new();
    fs::write(world.path("upstream/extra"), "x").unwrap();
    let upstream = world.path("upstream").display().to_string();
    world
        .run(&["setup", "--offline", "--source", &upstream])
        .exits(70)
        .says("error[KILN-0384]")
        .says("pinned: sha256-");
    let left: Vec<_> = fs::read_dir(world.path("store/pristine")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a5_another_llc_major_is_refused_and_an_explicit_one_is_never_skipped() {
    let world = World::new();
    world.setup();
    world.script("other/llc", &llvm_tool("23.1.4"));
    let mut command = world.command(&["build", "--arch", "sm_86"]);
    command.env("CUDA_OXIDE_LLC", world.path("other/llc"));
    finished(command.output().unwrap()).exits(70).says("23");
    let mut command = world.command(&["setup"]);
    command.env("CUDA_OXIDE_LLC", world.path("other/missing"));
    finished(command.output().unwrap()).exits(1).says("missing");
}

#[test]
fn e10_another_llc_arch_or_contraction_compiles_again_although_no_source_changed() {
    let world = World::new();
    world.setup();
    let calls =
        |arch: &str| fs::read_to_string(world.path(&format!("work/target/device/{arch}/calls.txt"))).unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    assert_eq!(calls("sm_86"), "arch=sm_86 no_fma=1 ptx=false\narch=sm_86 no_fma=1 ptx=true\n");
    world.run(&["build", "--arch", "sm_90"]).exits(0);
    assert_eq!(calls("sm_90"), "arch=sm_90 no_fma=1 ptx=false\n");
    // Another llc of the same major, at the same paths.
    world.lay_llvm("22.1.9");
    world.run(&["build", "--arch", "sm_90"]).exits(0);
    assert_eq!(calls("sm_90"), "arch=sm_90 no_fma=1 ptx=false\narch=sm_90 no_fma=1 ptx=false\n");
}

#[test]
fn f8_the_flag_wins_over_the_variable_and_the_file_and_the_ptx_is_checked() {
    let world = World::new();
    world.setup();
    let config = world.path("work/.cargo/cuda-oxide.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("default-arch = \"sm_80\"\n{text}")).unwrap();
    let mut command = world.command(&["build", "--arch", "sm_86"]);
    command.env("CUDA_OXIDE_TARGET", "sm_90");
    let run = finished(command.output().unwrap()).exits(0).says("CUDA_OXIDE_TARGET=sm_90 is ignored");
    assert!(run.stdout.contains(".target sm_86"), "{}", run.stdout);

    // An llc that lowers for something else than it was asked for.
    let liar = llvm_tool("22.1.8").replace(".target $arch", ".target sm_80");
    world.script("bin/llc-22", &liar);
    world.run(&["build", "--arch", "sm_90"]).exits(70).says("sm_80").says("llc-22");
}

#[test]
fn a11_a_leaked_intrinsic_fails_the_build() {
    let world = World::new();
    world.setup();
    let leaky = llvm_tool("22.1.8").replace(".visible", ".extern .func llvm.nvvm.stmatrix.x;\n.visible");
    world.script("bin/llc-22", &leaky);
    world.run(&["build", "--arch", "sm_86"]).exits(70).says("llvm.nvvm.stmatrix.x").says("llc-22");
}

#[test]
fn f1_f2_misspelt_archs_are_refused_before_anything_else() {
    let world = World::new();
    for wrong in [
        "SM_86",
        "86",
        "8.6",
        "compute_86",
        "sm86",
        "sm_86 ",
        "sm_086",
        "sm_8６",
        "",
        "sm_86,sm_90",
        "sm_86a",
        "native",
    ] {
        let run = world.run(&["build", "--arch", wrong]).exits(1);
        assert!(run.stderr.contains("hint: "), "{wrong:?}: {}", run.stderr);
    }
}

#[test]
fn f3_an_arch_that_this_llc_does_not_know_is_refused_early() {
    let world = World::new();
    world.run(&["build", "--arch", "sm_120"]).exits(1).says("sm_120").says("llc-22");
    assert!(world.run(&["doctor", "--arch", "sm_120"]).stdout.contains("sm_120"));
}

#[test]
fn b5_a_drifted_host_config_is_refused_with_both_sides() {
    let world = World::new();
    world.setup();
    fs::write(world.path("work/.cargo/config.toml"), "[build]\nrustflags = ['--cfg', 'mine']\n").unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(70).says("--cfg").says("cargo xtask setup");
    assert!(world.run(&["doctor"]).exits(70).stdout.contains("--cfg"));
    world.run(&["setup"]).exits(0);
    let written = fs::read_to_string(world.path("work/.cargo/cuda-oxide.toml")).unwrap();
    assert!(written.contains(r#"extra-rustflags = ["--cfg", "mine"]"#), "{written}");
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn another_cuda_oxide_backend_in_the_environment_is_refused() {
    let world = World::new();
    world.setup();
    let mut command = world.command(&["build", "--arch", "sm_86"]);
    command.env("CUDA_OXIDE_BACKEND", world.path("other.so"));
    finished(command.output().unwrap()).exits(70).says("error[KILN-0132]");
}

#[test]
fn e1_two_setups_at_once_both_succeed_and_build_once() {
    let world = World::new();
    let upstream = world.path("upstream").display().to_string();
    let start = || {
        let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let both = [start(), start()].map(|child| finished(child.wait_with_output().unwrap()).exits(0));
    let builds = both.iter().filter(|run| run.stderr.contains("building rustc_codegen_cuda")).count();
    assert_eq!(builds, 1, "{}\n{}", both[0].stderr, both[1].stderr);
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn b17_a_relative_store_is_the_same_folder_from_everywhere() {
    let world = World::new();
    let upstream = world.path("upstream").display().to_string();
    let mut command =
        world.command(&["setup", "--offline", "--source", &upstream, "--store", "target/the store"]);
    command.env_remove("KILN_STORE").current_dir(world.path("work/kernels/device"));
    finished(command.output().unwrap()).exits(0);
    assert!(world.path("work/target/the store/backends").is_dir());
    let config = fs::read_to_string(world.path("work/.cargo/cuda-oxide.toml")).unwrap();
    assert!(
        config.contains(&format!("backend = \"{}/backends/", world.path("work/target/the store").display())),
        "{config}"
    );

    // The choice is remembered, and from the root it is the same.
    let mut command = world.command(&["build", "--arch", "sm_86"]);
    command.env_remove("KILN_STORE").env_remove("KILN_TOOLCHAIN");
    finished(command.output().unwrap()).exits(0);
}

#[test]
fn g1_spaces_and_other_scripts_in_every_path_work() {
    let world = World::below("a b/ü");
    world.setup();
    world.run(&["doctor"]).exits(0);
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn g4_d1_a_store_inside_the_checkout_is_shielded_from_its_git_and_cargo_settings() {
    let world = World::new();
    fs::create_dir(world.path("work/.git")).unwrap();
    fs::write(world.path("work/Cargo.toml"), "[workspace]\n").unwrap();
    fs::write(
        world.path("work/.cargo/config.toml"),
        "[build]\nrustflags = ['--this-flag-does-not-exist']\ntarget-dir = 'elsewhere'\nrustc-wrapper = 'no-such-program'\n",
    )
    .unwrap();
    let upstream = world.path("upstream").display().to_string();
    world.run(&["setup", "--offline", "--source", &upstream, "--store", "target/store"]).exits(0);
    assert!(!world.path("work/elsewhere").exists());
}

#[test]
fn b3_b15_g3_variables_of_the_user_s_builds_do_not_reach_the_backend() {
    let mut world = World::new();
    for (name, value) in [
        ("RUSTUP_TOOLCHAIN", "no-such-toolchain"),
        ("RUSTC_WRAPPER", "/no/such/wrapper"),
        ("RUSTC_WORKSPACE_WRAPPER", "./w"),
        ("CARGO_BUILD_RUSTC", "/no/such/rustc"),
        ("CARGO_TARGET_DIR", "moved"),
        ("CARGO_BUILD_TARGET", "no-such-target"),
        ("CARGO_INCREMENTAL", "1"),
        ("RUSTFLAGS", "--cfg from_the_user"),
    ] {
        world.variables.push((name.to_owned(), value.to_owned()));
    }
    world.setup();
    assert!(!world.path("work/moved").exists());
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn the_same_backend_comes_out_of_two_stores() {
    let (one, two) = (World::new(), World::below("another/place"));
    one.setup();
    two.setup();
    assert!(fs::read(one.backend()).unwrap() == fs::read(two.backend()).unwrap(), "the libraries differ");
}

#[test]
fn c12_a_read_only_store_serves_doctor_and_build() {
    let world = World::new();
    world.setup();
    let mode = |mode| {
        let all = [
            world.path("store"),
            world.path("store/backends"),
            world.path("store/sources"),
            world.path("store/locks"),
        ];
        for folder in all {
            fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    // As root this proves nothing about permissions, but a reader that locked or staged would still leave a trace.
    let before = listing(&world);
    mode(0o555);
    world.run(&["doctor"]).exits(0);
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    mode(0o755);
    assert_eq!(listing(&world), before);
}

fn listing(world: &World) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![world.path("store")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let modified = entry.metadata().unwrap().modified().unwrap();
            found.push(format!("{} {modified:?}", entry.path().display()));
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

#[test]
fn g8_doctor_survives_a_machine_where_everything_is_broken() {
    let world = World::new();
    fs::write(world.path("work/PROVENANCE"), "[source\n").unwrap();
    fs::write(world.path("work/.cargo/cuda-oxide.toml"), "backend = [").unwrap();
    let mut command = world.command(&["doctor"]);
    command.env_clear();
    let run = finished(command.output().unwrap()).exits(1);
    assert!(run.stdout.contains("[KILN-0203]") && run.stdout.contains("not ready"), "{}", run.stdout);
    assert_eq!(run.stderr, "");

    let mut command = world.command(&["doctor", "--json"]);
    command.env_clear();
    let run = finished(command.output().unwrap()).exits(1);
    let report: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report["schema"], "kiln.doctor/1");
    assert_eq!(report["ok"], false);
    assert_eq!(report["exit"], 1);
    let subjects: Vec<_> = report["decisions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|decision| decision["subject"].as_str().unwrap())
        .collect();
    assert_eq!(
        subjects,
        [
            "provenance",
            "store",
            "rustc",
            "llc",
            "opt",
            "source",
            "backend",
            "backend_load",
            "host_flags",
            "checkout",
            "cuda_toolkit",
            "libnvvm",
            "ptxas",
            "libclang",
            "gpu"
        ]
    );
}

#[test]
fn g8_a_closed_standard_output_is_no_panic() {
    let world = World::new();
    let mut command = world.command(&["doctor"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn b20_a_missing_rustup_is_no_crash_and_the_exact_command_is_given() {
    let world = World::new();
    let mut command = world.command(&["doctor"]);
    command.env_remove("KILN_TOOLCHAIN");
    let run = finished(command.output().unwrap()).exits(1);
    assert!(run.stdout.contains("rustup toolchain install"), "{}", run.stdout);
}

#[test]
fn a_toolchain_without_rustc_dev_is_named_with_the_command() {
    let world = World::new();
    let lib =
        fs::read_dir(world.path("sysroot/lib/rustlib")).unwrap().next().unwrap().unwrap().path().join("lib");
    fs::remove_file(lib.join("librustc_codegen_ssa-0.rmeta")).unwrap();
    let run = world.run(&["setup", "--offline"]).exits(1).says("error[KILN-0504]");
    run.says("rustup component add rustc-dev --toolchain");
}

#[test]
fn setup_has_rustup_add_rustc_dev_and_goes_on() {
    let world = World::new();
    let lib =
        fs::read_dir(world.path("sysroot/lib/rustlib")).unwrap().next().unwrap().unwrap().path().join("lib");
    let present = lib.join("librustc_codegen_ssa-0.rmeta");
    fs::remove_file(&present).unwrap();
    let upstream = world.path("upstream").display().to_string();
    world.script("bin/rustup", "#!/bin/sh\necho 'no network' >&2\nexit 3\n");
    let failed = world.run(&["setup", "--source", &upstream]).exits(1).says("error[KILN-0504]");
    failed.says("rustup did not add it: it ended with exit status: 3");

    let adds = format!(
        "#!/bin/sh\n[ -z \"$RUSTUP_TOOLCHAIN\" ] && echo \"$@\" > '{}' && touch '{}'\n",
        world.path("asked").display(),
        present.display()
    );
    world.script("bin/rustup", &adds);
    world.run(&["setup", "--source", &upstream]).exits(0).says("adding rustc-dev to");
    let asked = fs::read_to_string(world.path("asked")).unwrap();
    assert!(asked.starts_with("component add rustc-dev --toolchain 1."), "{asked}");
}

#[test]
fn the_wrong_rustc_is_refused() {
    let world = World::new();
    world.script(
        "sysroot/bin/rustc",
        "#!/bin/sh\necho 'release: 1.96.0'; echo 'commit-hash: 0000000000000000000000000000000000000000'; echo 'host: x'\n",
    );
    world.run(&["setup", "--offline"]).exits(70).says("error[KILN-0503]").says("1.96.0");
}

#[test]
fn e8_an_entry_without_its_record_does_not_exist() {
    let world = World::new();
    world.setup();
    fs::remove_file(world.backend().with_file_name("record.json")).unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(1).says("error[KILN-0910]");
    world.setup();
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn e5_a_republished_backend_is_a_new_file() {
    let world = World::new();
    world.setup();
    let mut open = fs::File::options().read(true).append(true).open(world.backend()).unwrap();
    open.write_all(b"tampered").unwrap();
    world.setup();
    // Whoever had the old one mapped still has it; the new one has the right length.
    let length = |file: &fs::File| file.metadata().unwrap().len();
    assert_eq!(length(&open), length(&fs::File::open(world.backend()).unwrap()) + 8);
}

#[test]
fn g7_a_checkout_behind_a_link_uses_its_physical_settings() {
    let world = World::new();
    world.setup();
    symlink(world.path("work"), world.path("link")).unwrap();
    let mut command = world.command(&["build", "--arch", "sm_86"]);
    command.current_dir(world.path("link"));
    finished(command.output().unwrap()).exits(0);
}

#[test]
fn explain_knows_the_codes() {
    let world = World::new();
    let run = world.run(&["explain", "KILN-0911"]).exits(0);
    assert!(
        run.stdout.starts_with("KILN-0911: ") && run.stdout.ends_with("PROVENANCE says)\n"),
        "{}",
        run.stdout
    );
    world.run(&["explain", "KILN-9999"]).exits(1).says("error[KILN-0120]");
}

/// The backend's key, and the sha256 of its library and of cargo-oxide, as the record has them.
fn recorded_output(world: &World) -> (String, Vec<String>) {
    let text = fs::read_to_string(world.backend().with_file_name("record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    let key = &record["predicate"]["buildDefinition"]["internalParameters"]["key"];
    let digests = record["subject"].as_array().unwrap().iter();
    let digests = digests.map(|subject| subject["digest"]["sha256"].as_str().unwrap().to_owned());
    (key.as_str().unwrap().to_owned(), digests.collect())
}

#[test]
fn the_record_says_what_the_build_took() {
    let world = World::new();
    world.setup();
    let doctor = world.run(&["doctor"]);
    assert!(doctor.stdout.contains("its build took "), "{}", doctor.stdout);
    let text = fs::read_to_string(world.backend().with_file_name("record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    let by_products = record["predicate"]["runDetails"]["byproducts"].as_array().unwrap();
    let cost = by_products.iter().find(|one| one["name"] == "build-cost").unwrap();
    let figure = |name: &str| cost["annotations"][name].as_str().unwrap().parse::<f64>().unwrap();
    assert!(figure("wall-seconds") > 0.0 && figure("crates") >= 2.0, "{cost}");
    assert_eq!(cost["annotations"]["partial"], "false");
    if cfg!(target_os = "linux") {
        assert!(figure("processor-seconds") > 0.0 && figure("peak-memory-bytes") > 1e6, "{cost}");
    }
}

#[test]
fn a_backend_with_other_bytes_than_recorded_is_refused_until_it_is_accepted() {
    let world = World::new();
    world.setup().says("PROVENANCE does not record what these inputs give");
    let pin = || fs::read_to_string(world.path("work/PROVENANCE")).unwrap();
    let upstream = world.path("upstream").display().to_string();
    let accept = ["setup", "--offline", "--source", &upstream, "--accept"];

    // What is recorded is compared, in the store and after a build.
    world.run(&accept).exits(0).says("PROVENANCE records ");
    let (key, digests) = recorded_output(&world);
    assert!(digests.iter().chain([&key]).all(|text| pin().contains(text.as_str())), "{}", pin());
    let good = pin();
    world.run(&accept).exits(0);
    assert_eq!(pin(), good, "nothing is recorded twice");
    world.run(&["build", "--arch", "sm_86"]).exits(0);

    world.edit("work/PROVENANCE", &digests[0], &"0".repeat(64));
    for verb in [&["build", "--arch", "sm_86"][..], &["setup", "--offline", "--source", &upstream]] {
        world.run(verb).exits(70).says("error[KILN-0916]").says(&digests[0]).says("verify --rebuild");
    }
    fs::remove_dir_all(world.path("store/backends")).unwrap();
    world.run(&["setup", "--offline", "--source", &upstream]).exits(70).says("error[KILN-0916]");
    assert!(
        !world.path("store/backends").exists()
            || fs::read_dir(world.path("store/backends")).unwrap().next().is_none()
    );

    // Beside what is there.
    world.run(&accept).exits(0);
    assert!(pin().contains(&digests[0]) && pin().contains(&"0".repeat(64)), "{}", pin());
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}
