//! The verbs on odd machines: other settings, another GPU, no home, a checkout without git, files of another user.

mod support;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use support::{Run, World, finished};

fn with(world: &World, arguments: &[&str], variables: &[(&str, &str)]) -> Run {
    let mut command = world.command(arguments);
    command.envs(variables.iter().copied());
    finished(command.output().unwrap())
}

fn seen(world: &World, arch: &str) -> String {
    fs::read_to_string(world.path(&format!("work/target/device/{arch}/seen.txt"))).unwrap()
}

#[test]
fn b1_a_rustc_of_the_same_commit_that_says_something_else_has_no_backend_yet() {
    let world = World::new();
    world.setup();
    world.edit(
        "sysroot/bin/rustc",
        "[ -n \"$backend\" ] ||",
        "[ \"$*\" != -vV ] || echo 'LLVM version: 99.0.0'\n[ -n \"$backend\" ] ||",
    );
    world.run(&["build", "--arch", "sm_86"]).exits(1).says("error[KILN-0910]");
    world.setup();
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    assert_eq!(fs::read_dir(world.path("store/backends")).unwrap().count(), 2, "each rustc has its own");
}

#[test]
fn b1_an_entry_of_another_key_is_refused() {
    let mut world = World::new();
    world.setup();
    let first = world.backend().parent().unwrap().to_owned();
    world.patches.push("0002-more.patch");
    let patch = "More.\n\n--- /dev/null\n+++ b/more\n@@ -0,0 +1 @@\n+x\n";
    fs::write(world.path("work/backend-patches/0002-more.patch"), patch).unwrap();
    world.pin();
    world.setup();
    let mut entries = fs::read_dir(world.path("store/backends")).unwrap().map(|entry| entry.unwrap().path());
    let second = entries.find(|entry| *entry != first).unwrap();
    fs::remove_dir_all(&second).unwrap();
    fs::rename(&first, &second).unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(70).says("error[KILN-0911]").says("of another backend");
}

#[test]
fn b13_target_cpu_native_reaches_the_host_config_alone_and_never_the_shared_backend() {
    let (plain, native) = (World::new(), World::new());
    fs::write(
        native.path("work/.cargo/config.toml"),
        "[target.'cfg(unix)']\nrustflags = ['-Ctarget-cpu=native']\n",
    )
    .unwrap();
    plain.setup();
    native.setup();
    let key = |world: &World| world.backend().parent().unwrap().file_name().unwrap().to_owned();
    assert_eq!(key(&plain), key(&native));
    assert!(fs::read(plain.backend()).unwrap() == fs::read(native.backend()).unwrap());
    let config = fs::read_to_string(native.path("work/.cargo/cuda-oxide.toml")).unwrap();
    assert!(config.contains("-Ctarget-cpu=native"), "{config}");
    // It belongs to this machine: git must not carry it to another one.
    let ignored = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.gitignore")).unwrap();
    let link = format!("/{}", xtask::backend::checkout::LINK);
    for file in ["/.cargo/cuda-oxide.toml", "/.cargo/kiln.toml", &link] {
        assert!(ignored.lines().any(|line| line == file), "{file} is not ignored");
    }
}

#[test]
fn b14_setup_and_build_never_pass_target_so_host_flags_reach_build_scripts_in_one_way() {
    let world = World::new();
    world.setup();
    for variables in [&[][..], &[("CARGO_BUILD_TARGET", "wasm32-unknown-unknown")]] {
        with(&world, &["build", "--arch", "sm_86"], variables).exits(0);
        let seen = seen(&world, "sm_86");
        assert!(!seen.contains("--target ") && !seen.contains("--target="), "{seen}");
    }
}

#[test]
fn b15_doctor_lists_what_is_cleared() {
    let world = World::new();
    fs::write(world.path("home/.cargo/config.toml"), "[build]\nrustc-wrapper = 'sccache'\n").unwrap();
    let run = with(
        &world,
        &["doctor"],
        &[
            ("RUSTC_WRAPPER", "/no/such/wrapper"),
            ("RUSTC_WORKSPACE_WRAPPER", "./w"),
            ("RUSTC", "/no/such/rustc"),
        ],
    );
    for line in [
        "cleared for our builds: RUSTC_WRAPPER",
        "/no/such/wrapper does not exist",
        "cleared for our builds: RUSTC_WORKSPACE_WRAPPER",
        "cleared for our builds: RUSTC=/no/such/rustc",
        "sccache",
    ] {
        assert!(run.stdout.contains(line), "no {line:?} in\n{}", run.stdout);
    }
}

#[test]
fn b18_from_a_subfolder_or_from_the_root_folder_it_is_the_same_workspace() {
    let world = World::new();
    fs::create_dir_all(world.path("work/kernels/device/.cargo")).unwrap();
    fs::write(
        world.path("work/kernels/device/.cargo/config.toml"),
        "[build]\nrustflags = ['--cfg', 'subfolder']\n",
    )
    .unwrap();
    world.setup();
    let manifest = world.path("work/xtask");
    let from_subfolder = |command: &mut Command| {
        command.current_dir(world.path("work/kernels/device"));
    };
    // As `cargo run --manifest-path work/xtask/Cargo.toml` does it.
    let from_root = |command: &mut Command| {
        command.current_dir("/").env("CARGO_MANIFEST_DIR", &manifest);
    };
    for place in [&from_subfolder as &dyn Fn(&mut Command), &from_root] {
        let mut command = world.command(&["build", "--arch", "sm_86"]);
        place(&mut command);
        finished(command.output().unwrap()).exits(0);
        let seen = seen(&world, "sm_86");
        let root = fs::canonicalize(world.path("work")).unwrap();
        assert_eq!(seen.lines().next(), root.to_str(), "the child starts at the workspace root");
    }
    let config = fs::read_to_string(world.path("work/.cargo/cuda-oxide.toml")).unwrap();
    assert!(!config.contains("subfolder"), "{config}");
}

#[test]
fn b19_the_user_s_library_folders_are_kept_in_front_and_no_empty_element_is_made() {
    let world = World::new();
    world.setup();
    let stubs = world.path("cuda/lib64/stubs").display().to_string();
    for (own, expected) in [("/opt/ffi/lib", "/opt/ffi/lib:"), ("", ""), (":/opt/ffi/lib:", "/opt/ffi/lib:")]
    {
        with(&world, &["build", "--arch", "sm_86"], &[("LIBRARY_PATH", own)]).exits(0);
        let seen = seen(&world, "sm_86");
        assert!(seen.contains(&format!("\nLIBRARY_PATH={expected}{stubs}\n")), "{own:?}: {seen}");
    }
}

#[test]
fn b20_another_rustc_first_on_path_is_shown_and_not_used() {
    let world = World::new();
    world.script(
        "bin/rustc",
        "#!/bin/sh\necho 'rustc 1.63.0 (Debian)'; echo 'release: 1.63.0'; echo 'commit-hash: unknown'; echo 'host: x'\n",
    );
    // A distribution's rustc has its libraries beside it.
    fs::create_dir_all(world.path("lib/rustlib")).unwrap();
    world.setup();
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    let mut command = world.command(&["doctor"]);
    command.env_remove("KILN_TOOLCHAIN");
    fs::remove_file(world.path("work/.cargo/kiln.toml")).unwrap();
    let run = finished(command.output().unwrap());
    let line = run.stdout.lines().find(|line| line.contains("bin/rustc)") && line.contains("rejected"));
    assert!(line.is_some_and(|line| line.contains("1.63.0")), "{}", run.stdout);
}

#[test]
fn e7_a_file_system_without_locks_is_refused_by_name() {
    let world = World::new();
    let shim = "#[unsafe(no_mangle)]\npub extern \"C\" fn flock(_: i32, _: i32) -> i32 {\n    \
                unsafe extern \"C\" { fn __errno_location() -> *mut i32; }\n    \
                unsafe { *__errno_location() = 37 };\n    -1\n}\n";
    fs::write(world.path("shim.rs"), shim).unwrap();
    let made = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()))
        .args(["--edition", "2024", "--crate-type", "cdylib", "-Cpanic=abort", "-o"])
        .args([world.path("shim.so"), world.path("shim.rs")])
        .output()
        .unwrap();
    if !made.status.success() || !cfg!(all(target_os = "linux", target_env = "gnu")) {
        support::skipped("e7", "no library can be loaded in front of libc here");
        return;
    }
    let upstream = world.path("upstream").display().to_string();
    let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
    command.env("LD_PRELOAD", world.path("shim.so"));
    let run =
        finished(command.output().unwrap()).exits(1).says("error[KILN-0902]").says("No locks available");
    run.says("hint: choose a store on a local disk");
}

#[test]
fn e9_two_checkouts_with_other_patches_share_a_store_and_build_once_each() {
    let world = World::new();
    let second = world.path("second");
    for folder in ["kernels/device", "backend-patches", ".cargo"] {
        fs::create_dir_all(second.join(folder)).unwrap();
    }
    for file in ["PROVENANCE", "backend-patches/0001-change.patch"] {
        fs::copy(world.path("work").join(file), second.join(file)).unwrap();
    }
    let other = "Other.\n\n--- /dev/null\n+++ b/other\n@@ -0,0 +1 @@\n+x\n";
    fs::write(second.join("backend-patches/0002-other.patch"), other).unwrap();
    let sha256 = xtask::base::hash::Sha256::of(other.as_bytes());
    let pins = fs::read_to_string(second.join("PROVENANCE")).unwrap().replace(
        "[toolchain]",
        &format!(
            "[[patch]]\nfile = \"0002-other.patch\"\nsha256 = \"{sha256}\"\nreason = \"b\"\n\n[toolchain]"
        ),
    );
    fs::write(second.join("PROVENANCE"), pins).unwrap();

    let upstream = world.path("upstream").display().to_string();
    let setup = |folder: &Path| {
        let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
        finished(command.current_dir(folder).output().unwrap()).exits(0)
    };
    let first = world.path("work");
    setup(&first);
    setup(&second);
    for _ in 0..2 {
        for folder in [&first, &second] {
            let again = setup(folder);
            assert_eq!(again.stdout, "setup: everything is in place, nothing was done\n");
            let mut command = world.command(&["build", "--arch", "sm_86"]);
            finished(command.current_dir(folder).output().unwrap()).exits(0);
        }
    }
    let count = |folder: &str| fs::read_dir(world.path("store").join(folder)).unwrap().count();
    assert_eq!([count("pristine"), count("sources"), count("backends")], [1, 2, 2]);
}

/// An nvidia-smi that lists `cards` and whose banner says CUDA `cuda`.
fn nvidia_smi(world: &World, cards: &str, cuda: &str) {
    world.script(
        "bin/nvidia-smi",
        &format!(
            "#!/bin/sh\ncase \"$1\" in\n--query-gpu*) printf '%s\\n' '{cards}' ;;\n\
             *) echo '| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: {cuda} |' ;;\nesac\n"
        ),
    );
}

/// The lines of doctor's report about `subject`.
fn about(run: &Run, subject: &str) -> String {
    let lines = run.stdout.lines();
    let from = lines.skip_while(|line| line.split_whitespace().nth(1) != Some(subject));
    let mut first = true;
    from.take_while(|line| std::mem::take(&mut first) || line.starts_with(' ')).collect::<Vec<_>>().join("\n")
}

#[test]
fn f4_doctor_compares_a_locked_arch_with_the_card() {
    let world = World::new();
    world.edit("bin/llc-22", "sm_90 processor", "sm_90 processor.\\n  sm_90a - Select the sm_90a processor");
    nvidia_smi(&world, "NVIDIA RTX A6000, 8.6, 550.54", "12.4");
    let run = world.run(&["doctor", "--arch", "sm_90a"]);
    let archs = about(&run, "arch");
    assert!(archs.contains("NVIDIA RTX A6000: ") && archs.contains("9.0"), "{}", run.stdout);
}

#[test]
fn f5_doctor_predicts_a_driver_that_is_too_old_for_the_arch() {
    let world = World::new();
    world.edit("bin/llc-22", "sm_90 processor", "sm_90 processor.\\n  sm_120 - Select the sm_120 processor");
    nvidia_smi(&world, "NVIDIA RTX A6000, 8.6, 550.54", "12.4");
    let run = world.run(&["doctor", "--arch", "sm_120"]);
    let arch = about(&run, "arch");
    assert!(arch.contains("CUDA_ERROR_UNSUPPORTED_PTX_VERSION") && arch.contains("12.4"), "{}", run.stdout);
    assert!(about(&run, "gpu").contains("PTX up to 8.4"), "{}", run.stdout);
}

#[test]
fn f6_doctor_shows_the_ptxas_of_the_toolkit_although_an_older_one_is_first_on_path() {
    let world = World::new();
    world.script("bin/ptxas", "#!/bin/sh\necho 'Cuda compilation tools, release 11.5, V11.5.119'\n");
    let run = world.run(&["doctor"]);
    let ptxas = about(&run, "ptxas");
    assert!(ptxas.contains("cuda/bin/ptxas") && ptxas.contains("13.0"), "{}", run.stdout);
}

#[test]
fn f7_doctor_is_told_nonsense_by_nvidia_smi_and_stays_useful() {
    let world = World::new();
    world.setup();
    let failed = "Failed to initialize NVML: Driver/library version mismatch";
    for (script, says) in [
        (format!("#!/bin/sh\necho '{failed}'\n"), failed),
        (format!("#!/bin/sh\necho '{failed}'; exit 18\n"), failed),
        ("#!/bin/sh\necho '[N/A], [N/A], [N/A]'\n".to_owned(), "GPU unknown"),
        ("#!/bin/sh\necho 'name, compute_cap, driver_version'\n".to_owned(), "GPU unknown"),
        ("#!/bin/sh\nkill -SEGV $$\n".to_owned(), "GPU unknown"),
    ] {
        world.script("bin/nvidia-smi", &script);
        let run = world.run(&["doctor"]).exits(0);
        assert!(about(&run, "gpu").contains(says), "{script}\n{}", run.stdout);
    }
    nvidia_smi(&world, "NVIDIA A6000, 8.6, 550.54\nNVIDIA B, 12.0, 550.54", "12.4");
    let run = world.run(&["doctor"]).exits(0);
    assert!(about(&run, "gpu").contains("capability 8.6), NVIDIA B (capability 12.0)"), "{}", run.stdout);
}

#[test]
fn g2_without_home_the_message_names_the_way_out() {
    let world = World::new();
    let upstream = world.path("upstream").display().to_string();
    let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
    command.env_remove("HOME").env_remove("KILN_STORE");
    finished(command.output().unwrap())
        .exits(1)
        .says("error[KILN-0901]")
        .says("hint: give one with --store DIR");
    // With a store, CARGO_HOME is the next thing that is missing, and it is enough.
    let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
    command.env_remove("HOME");
    finished(command.output().unwrap()).exits(1).says("CARGO_HOME");
    let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
    command.env_remove("HOME").env("CARGO_HOME", world.path("home/.cargo"));
    finished(command.output().unwrap()).exits(0);
}

#[test]
fn g2_a_literal_tilde_is_named_before_anything_is_made() {
    let world = World::new();
    let upstream = world.path("upstream").display().to_string();
    for (name, value) in [("CARGO_HOME", "~/.cargo"), ("KILN_STORE", "~/store")] {
        let run = with(&world, &["setup", "--offline", "--source", &upstream], &[(name, value)]);
        let run = run.exits(1).says("error[KILN-").says(name).says("a literal `~`").says("hint: ");
        assert!(!world.path("work/~").exists(), "{}", run.stderr);
        assert!(!world.path("store").exists(), "{name}: something was made\n{}", run.stderr);
        let run = with(&world, &["doctor"], &[(name, value)]).exits(1);
        assert!(run.stdout.contains("a literal `~`"), "{}", run.stdout);
    }
    let run = world.run(&["setup", "--store", "~/store"]).exits(1).says("--store").says("a literal `~`");
    assert!(!world.path("work/~").exists(), "{}", run.stderr);
}

#[test]
fn g2_a_deleted_working_folder_is_named_or_does_not_matter() {
    let world = World::new();
    world.setup();
    fs::create_dir(world.path("gone")).unwrap();
    let script = "rmdir ../gone && exec \"$@\"";
    for (inside_cargo, status) in [(true, 0), (false, 1)] {
        let xtask = world.command(&["doctor"]);
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).arg(xtask.get_program()).arg("doctor").env_clear();
        command.envs(xtask.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.current_dir(world.path("gone"));
        if inside_cargo {
            command.env("CARGO_MANIFEST_DIR", world.path("work/xtask"));
        }
        let run = finished(command.output().unwrap()).exits(status);
        if status != 0 {
            run.says("error[KILN-0102]: the working folder does not exist").says("hint: change to");
        }
        fs::create_dir(world.path("gone")).unwrap();
    }
}

#[test]
fn g5_a_linked_worktree_a_submodule_and_a_tarball_copy_need_no_git_folder() {
    // A tarball copy has no .git at all: that is what every test here uses. The others have a file.
    let world = World::new();
    for text in ["gitdir: /no/such/main/.git/worktrees/w\n", "gitdir: ../.git/modules/kiln\n"] {
        fs::write(world.path("work/.git"), text).unwrap();
        world.setup();
        world.run(&["doctor"]).exits(0);
        world.run(&["build", "--arch", "sm_86"]).exits(0);
        fs::remove_dir_all(world.path("store")).unwrap();
    }
}

#[test]
fn g5_a_linked_worktree_as_source_is_read_as_the_repository_that_it_is() {
    let world = World::new();
    let git = |folder: &str, arguments: &[&str]| {
        let mut command = Command::new("git");
        command.args(["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-C"]);
        command.arg(world.path(folder)).args(arguments).env("HOME", world.path("home"));
        command.env("GIT_CONFIG_NOSYSTEM", "1").env_remove("GIT_DIR").env_remove("GIT_INDEX_FILE");
        command.output().map(|output| {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        })
    };
    if git("upstream", &["init", "--quiet"]).is_err() {
        support::skipped("g5", "there is no git");
        return;
    }
    git("upstream", &["add", "-A"]).unwrap();
    git("upstream", &["commit", "--quiet", "-m", "synthetic"]).unwrap();
    let revision = git("upstream", &["rev-parse", "HEAD"]).unwrap();
    git("upstream", &["worktree", "add", "--quiet", "../linked"]).unwrap();
    world.edit("work/PROVENANCE", support::REVISION, &revision);
    let linked = world.path("linked").display().to_string();
    world.run(&["setup", "--offline", "--source", &linked]).exits(0);
}

#[test]
fn g8_doctor_reads_on_when_the_store_cannot_be_read_and_never_writes() {
    let world = World::new();
    fs::write(world.path("store"), "a file where the store belongs").unwrap();
    let run = world.run(&["doctor"]);
    assert_ne!(run.status, 0);
    assert!(run.stdout.contains("ok   llc") && run.stdout.contains("ok   host_flags"), "{}", run.stdout);
    assert!(run.stdout.contains("[KILN-"), "{}", run.stdout);
    let made = fs::read_dir(world.path("work")).unwrap().count();
    assert_eq!(made, 4, "PROVENANCE, kernels, backend-patches and .cargo were there before");
    world.run(&["setup"]).says("error[KILN-").says("hint: ");
}

#[test]
fn g8_a_closed_standard_error_or_full_output_is_no_panic() {
    let world = World::new();
    let mut child = world.command(&["setup"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let Ok(full) = fs::File::options().write(true).open("/dev/full") else {
        support::skipped("g8", "there is no /dev/full");
        return;
    };
    let mut command = world.command(&["doctor"]);
    let run = finished(command.stdout(full).output().unwrap());
    run.exits(1).says("error[KILN-0103]");
}

#[test]
fn g9_files_of_another_user_are_named_with_the_command() {
    let world = World::new();
    world.setup();
    let entry = world.path("store/backends");
    if std::os::unix::fs::chown(&entry, Some(12_345), None).is_err() {
        support::skipped("g9", "only root can give a file away");
        return;
    }
    let run = world.run(&["doctor"]).exits(0);
    let store = about(&run, "store");
    assert!(store.contains(&format!("{} belongs to user 12345", entry.display())), "{}", run.stdout);
    assert!(store.contains("chown -R"), "{}", run.stdout);
}

#[test]
fn a13_doctor_build_and_setup_choose_the_same_tools() {
    let world = World::new();
    // Only the config file names it; PATH has another one of the same major in front.
    world.script("elsewhere/llc", &support::llvm_tool("22.1.7"));
    world.script("elsewhere/opt", &support::llvm_tool("22.1.7"));
    let llc = world.path("elsewhere/llc").display().to_string();
    fs::write(world.path("work/.cargo/cuda-oxide.toml"), format!("[env]\nCUDA_OXIDE_LLC = \"{llc}\"\n"))
        .unwrap();
    let run = world.setup();
    assert!(run.stdout.contains(&format!("llc       {llc} ")), "{}", run.stdout);
    let doctor = world.run(&["doctor"]).exits(0);
    assert!(about(&doctor, "llc").lines().next().unwrap().contains(&llc), "{}", doctor.stdout);
    world.run(&["build", "--arch", "sm_86"]).exits(0);
    let folder = world.path("work/target/device/sm_86");
    let ptx = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let ptx =
        ptx.into_iter().find(|path| path.file_name().unwrap().to_string_lossy().starts_with("ptx-")).unwrap();
    let text = fs::read_to_string(ptx.join("kiln_device.ptx")).unwrap();
    assert!(text.contains("// LLVM 22.1.7"), "build used another llc");
}

#[test]
fn a10_an_explicit_llc_that_cannot_be_used_fails_before_any_work() {
    let world = World::new();
    symlink("nowhere", world.path("dangling")).unwrap();
    fs::write(world.path("plain"), "not executable").unwrap();
    let upstream = world.path("upstream").display().to_string();
    for (value, says) in [
        (world.path("bin").into_os_string(), "is a directory"),
        (world.path("missing").into_os_string(), "missing"),
        (world.path("dangling").into_os_string(), "dangling"),
        (world.path("plain").into_os_string(), "plain"),
        (OsStr::new("~/llc").to_owned(), "~"),
        (OsStr::new("/no/such llc\n").to_owned(), "/no/such llc"),
    ] {
        let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
        command.env("CUDA_OXIDE_LLC", &value);
        finished(command.output().unwrap()).exits(1).says(says).says("hint: ");
        assert!(!world.path("store").exists(), "{value:?}: something was made");
    }
    // Empty is unset.
    with(&world, &["setup", "--offline", "--source", &upstream], &[("CUDA_OXIDE_LLC", "")]).exits(0);
}

#[test]
fn every_error_has_a_code_and_a_hint() {
    let world = World::new();
    for arguments in [
        &["biuld"][..],
        &["setup", "--no-such-option"],
        &["setup", "--source", "/no/such/thing"],
        &["setup", "--source", "/dev/null"],
        &["setup", "--store"],
        &["build", "--arch"],
        &["build", "--arch", "86"],
        &["explain", "KILN-9999"],
        &["completions", "csh"],
        &["man", "/dev/null"],
        &["setup", "--offline"],
    ] {
        let run = world.run(arguments);
        assert!(matches!(run.status, 1 | 2), "{arguments:?}: {}", run.status);
        let mut lines = run.stderr.lines();
        assert!(
            lines.next().is_some_and(|line| line.starts_with("error[KILN-")),
            "{arguments:?}: {}",
            run.stderr
        );
        assert!(run.stderr.lines().any(|line| line.starts_with("hint: ")), "{arguments:?}: {}", run.stderr);
        assert_eq!(run.stdout, "", "{arguments:?}");
    }
    assert_eq!(
        world.run(&["build", "--arch"]).stderr,
        "error[KILN-0105]: a value is required for '--arch <sm_NN[a|f]>' but none was supplied\n\
         hint: run: cargo xtask --help, or cargo xtask VERB --help\n"
    );
    let help = world.run(&[]).exits(1);
    assert!(help.stderr.contains("Usage: cargo xtask") && help.stderr.contains("doctor"), "{}", help.stderr);
    assert!(world.run(&["--help"]).exits(0).stdout.contains("Exit codes: 0 done"));
}

#[test]
fn quiet_leaves_warnings_and_errors_alone() {
    let world = World::new();
    fs::write(world.path("work/.cargo/config.toml"), "[target.'cfg(']\nrustflags = ['x']\n").unwrap();
    let upstream = world.path("upstream").display().to_string();
    let run = world.run(&["setup", "--quiet", "--offline", "--source", &upstream]).exits(0);
    assert!(run.stdout.contains("next      cargo xtask build"), "{}", run.stdout);
    let lines: Vec<_> = run.stderr.lines().collect();
    assert!(lines.len() == 1 && lines[0].starts_with("setup: warning: "), "{}", run.stderr);
    assert_eq!(world.run(&["build", "-q", "--arch", "sm_86"]).exits(0).stderr, "");
    assert!(seen(&world, "sm_86").contains(" --quiet"));
}

#[test]
fn no_color_and_no_terminal_leave_no_escape_sequence() {
    let world = World::new();
    let upstream = world.path("upstream").display().to_string();
    for arguments in
        [&["setup", "--offline", "--source", &upstream][..], &["doctor"], &["--help"], &["biuld"]]
    {
        let run = with(&world, arguments, &[("NO_COLOR", "1"), ("TERM", "xterm-256color")]);
        assert!(!run.stdout.contains('\u{1b}') && !run.stderr.contains('\u{1b}'), "{arguments:?}");
    }
}

#[test]
fn completions_and_manual_pages_need_no_checkout() {
    let world = World::new();
    let folder = world.path("elsewhere");
    fs::create_dir(&folder).unwrap();
    for (shell, says) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef xtask"),
        ("fish", "complete -c xtask"),
        ("powershell", "Register-ArgumentCompleter"),
    ] {
        let mut command = world.command(&["completions", shell]);
        let run = finished(command.current_dir(&folder).output().unwrap()).exits(0);
        assert!(run.stdout.contains(says) && run.stdout.contains("doctor"), "{shell}: {}", run.stdout);
    }
    let mut command = world.command(&["man", "pages"]);
    finished(command.current_dir(&folder).output().unwrap()).exits(0);
    for page in ["cargo-xtask.1", "cargo-xtask-setup.1", "cargo-xtask-doctor.1", "cargo-xtask-build.1"] {
        let text = fs::read_to_string(folder.join("pages").join(page)).unwrap();
        assert!(text.contains(".SH NAME"), "{page}: {text}");
    }
}

#[test]
fn g1_quotes_signs_and_separators_in_every_path_work_or_are_named() {
    let world = World::below("it's a \"test\" = #1 $HOME; a\\b *? ü");
    world.setup();
    world.run(&["doctor"]).exits(0);
    world.run(&["build", "--arch", "sm_86"]).exits(0);

    // Cargo puts the target folder into LD_LIBRARY_PATH, where a colon separates; lld makes other letters of `%`.
    let world = World::new();
    let upstream = world.path("upstream").display().to_string();
    for name in ["a:b", "100%", "a\nb"] {
        let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
        let run = finished(command.env("KILN_STORE", world.path(name)).output().unwrap()).exits(1);
        run.says("error[KILN-0904]").says(name).says("--store");
        assert!(!world.path(name).exists(), "nothing is fetched into a store that cannot be used");
    }
}

#[test]
fn e3_e8_every_damage_of_an_entry_is_refused_and_mended() {
    let world = World::new();
    world.setup();
    let source = fs::read_dir(world.path("store/sources")).unwrap().next().unwrap().unwrap().path();
    let backend = world.backend().parent().unwrap().to_owned();
    let library = xtask::backend::library_name();
    let files = [
        source.join("entry.json"),
        source.join("tree"),
        source.join("tree/Cargo.toml"),
        backend.join("record.json"),
        backend.join(&library),
        backend.join("cargo-oxide"),
        backend.clone(),
        source.clone(),
    ];
    let remove = |path: &Path| {
        let kind = fs::symlink_metadata(path).unwrap();
        if kind.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
    };
    type Damage = (&'static str, fn(&Path));
    let damages: [Damage; 4] = [
        ("removed", |_| {}),
        ("empty", |path| fs::write(path, "").unwrap()),
        ("a folder", |path| fs::create_dir(path).unwrap()),
        ("a dangling link", |path| symlink("nowhere", path).unwrap()),
    ];
    // Each damage somewhere, and each file damaged: all pairs would take minutes.
    for (file, (what, damage)) in files.iter().zip(damages.iter().cycle()) {
        let when = format!("{} {what}", file.display());
        remove(file);
        damage(file);
        let build = world.run(&["build", "--arch", "sm_86"]);
        assert!(matches!(build.status, 1 | 70), "{when}: {} {}", build.status, build.stderr);
        assert!(build.stderr.contains("hint: "), "{when}: {}", build.stderr);
        let in_the_way = [&backend, &source].contains(&file) && matches!(*what, "empty" | "a dangling link");
        if in_the_way {
            world.run(&["setup"]).exits(1).says("error[KILN-0903]").says("hint: move it away");
            remove(file);
        }
        world.run(&["setup", "--offline"]).exits(0);
    }
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

/// The cases by family, with how many there are.
const FAMILIES: [(char, usize); 7] =
    [('A', 15), ('B', 20), ('C', 19), ('D', 15), ('E', 10), ('F', 13), ('G', 9)];

#[test]
fn the_table_of_cases_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = root.join("../docs/cases.md");
    let mut tests = Vec::new();
    collect_tests(root, &mut tests);
    let text = fs::read_to_string(&page).unwrap();
    let mut cases = Vec::new();
    let mut fresh = String::new();
    for line in text.lines() {
        let cells: Vec<_> = line.split(" | ").map(|cell| cell.trim_matches(['|', ' '])).collect();
        let [case, _, behaviour, named] = cells[..] else {
            fresh.push_str(&format!("{line}\n"));
            continue;
        };
        if case == "case" {
            fresh.push_str(&format!("{line}\n"));
            continue;
        }
        cases.push(case.to_owned());
        assert!(!behaviour.is_empty(), "{case}: what happens?");
        let named: Vec<_> = named.split(", ").filter(|name| !name.is_empty()).collect();
        let about: Vec<_> = tests.iter().filter(|name| is_about(name, case)).cloned().collect();
        let start = line.rfind(" | ").unwrap();
        let listed: Vec<_> = about.iter().map(|name| format!("`{name}`")).collect();
        fresh.push_str(&format!("{} | {} |\n", &line[..start], listed.join(", ")));
        if std::env::var_os("KILN_BLESS").is_some() {
            continue;
        }
        assert!(!named.is_empty(), "{case} has no test");
        for name in named {
            let name = name.trim_matches('`');
            assert!(
                about.iter().any(|test| test == name),
                "{case}: there is no test {name}; KILN_BLESS=1 mends the table"
            );
        }
    }
    let expected: Vec<_> = FAMILIES
        .iter()
        .flat_map(|(family, count)| (1..=*count).map(move |number| format!("{family}{number}")))
        .collect();
    assert_eq!(cases, expected);
    if std::env::var_os("KILN_BLESS").is_some() {
        fs::write(page, fresh).unwrap();
    }
}

/// Says whether a test's name begins with the case, perhaps after others: `c9_c10_...` is about both.
fn is_about(test: &str, case: &str) -> bool {
    test.split('_')
        .take_while(|word| {
            word.len() > 1
                && word.starts_with(|c: char| ('a'..='g').contains(&c))
                && word[1..].bytes().all(|b| b.is_ascii_digit())
        })
        .any(|word| word.eq_ignore_ascii_case(case))
}

fn collect_tests(folder: &Path, tests: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect_tests(&path, tests);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let names =
                text.lines().filter_map(|line| line.trim_start().strip_prefix("fn ")?.split_once('('));
            tests.extend(names.map(|(name, _)| name.to_owned()));
        }
    }
    tests.sort();
    tests.dedup();
}
