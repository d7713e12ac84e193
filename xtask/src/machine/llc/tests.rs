use super::*;
use crate::machine::probe::tests::{executable, script};
use crate::report::decision::Candidate;
use fs_err::os::unix::fs::symlink;
use proptest::prelude::*;

const PTX: &str = "    nvptx       - NVIDIA PTX 32-bit\n    nvptx64     - NVIDIA PTX 64-bit\n";

fn banner_text(line: &str, targets: &str) -> String {
    format!(
        "{line}\n  Optimized build.\n  Default target: x86_64-pc-linux-gnu\n\n  Registered Targets:\n{targets}"
    )
}

/// A tool that answers with an LLVM banner.
pub(crate) fn fake(folder: &Path, name: &str, line: &str, targets: &str) -> PathBuf {
    script(folder, name, &format!("printf %s '{}'", banner_text(line, targets)))
}

/// A folder with `bin` on PATH and nothing else to be found.
struct World {
    folder: tempfile::TempDir,
    variables: Vec<(&'static str, OsString)>,
    request: LlcRequest,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bin").into_os_string();
        let request = LlcRequest {
            llc: None,
            opt: None,
            toolchain: None,
            preferred: LlvmMajor(22),
            asked: false,
            verified: vec![LlvmMajor(22)],
            folders: Vec::new(),
            thoroughness: Thoroughness::All,
        };
        World { folder, variables: vec![("PATH", path)], request }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn tool(&self, name: &str, version: &str) -> PathBuf {
        fake(self.folder.path(), name, &format!("Debian LLVM version {version}"), PTX)
    }

    fn env(&self) -> Env {
        Env::of(self.variables.clone(), self.folder.path())
    }

    fn find(&self) -> LlcChoice {
        let mut request = self.request.clone();
        request.llc = request.llc.or_else(|| Explicit::of("CUDA_OXIDE_LLC", &self.env(), &BTreeMap::new()));
        request.opt = request.opt.or_else(|| Explicit::of("CUDA_OXIDE_OPT", &self.env(), &BTreeMap::new()));
        let choice = find_llc(&request, &self.env());
        // Both thoroughnesses agree, whatever the case is.
        request.thoroughness = Thoroughness::First;
        let quick = find_llc(&request, &self.env());
        assert_eq!(quick.llc.value, choice.llc.value);
        assert_eq!(quick.llc.decision.chosen, choice.llc.decision.chosen);
        choice
    }

    fn chosen(&self) -> Tools {
        self.find().llc.require().unwrap().clone()
    }

    fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.variables.push((name, value.into()));
    }

    fn reasons(&self, decision: &Decision) -> Vec<String> {
        let root = format!("{}/", self.folder.path().display());
        let line = |candidate: &Candidate| {
            let verdict = match &candidate.verdict {
                Verdict::Chosen => "chosen".to_owned(),
                Verdict::Rejected(reason) => format!("rejected: {reason}"),
                Verdict::NotTried(reason) => format!("not tried: {reason}"),
            };
            format!("{} [{}] {verdict}", candidate.what, candidate.from).replace(&root, "")
        };
        decision.candidates.iter().map(line).collect()
    }
}

fn version_of(banner: &str) -> (u32, String, bool) {
    let version = parse_banner(banner).unwrap().version;
    (version.major.0, version.full, version.unreleased)
}

#[test]
fn a1_all_four_banner_layouts_are_read() {
    let cases = [
        ("Debian LLVM version 22.1.8", 22, "22.1.8"),
        ("Ubuntu LLVM version 21.1.8", 21, "21.1.8"),
        ("Homebrew LLVM version 22.1.8", 22, "22.1.8"),
        (
            "LLVM (http://llvm.org/):\n  LLVM version 22.1.2-rust-1.96.0-nightly",
            22,
            "22.1.2-rust-1.96.0-nightly",
        ),
        ("LLVM (http://llvm.org/):\n  LLVM version 23.1.1 some-info", 23, "23.1.1 some-info"),
        ("LLVM version 22.1.2-rust-1.96.0-nightly", 22, "22.1.2-rust-1.96.0-nightly"),
        ("Debian LLVM version 14.0.6", 14, "14.0.6"),
    ];
    for (line, major, full) in cases {
        assert_eq!(version_of(&banner_text(line, PTX)), (major, full.to_owned(), false), "{line}");
    }
}

#[test]
fn a2_suffixes_are_read_and_unreleased_builds_are_marked() {
    let cases = [
        ("18.0.0git", 18, true),
        ("22.0.0git", 22, true),
        ("18.1.7+libcxx", 18, false),
        ("7.0.0-svn331815-1~exp1~20180509", 7, true),
        ("23.1.0-rust-1.100.0-nightly", 23, false),
        ("23.1.0-rc2", 23, true),
        ("22.1.8", 22, false),
        // The development branch of LLVM 22, without a word; before LLVM 18 such a number was a release.
        ("22.0.0", 22, true),
        ("17.0.0", 17, false),
    ];
    for (full, major, unreleased) in cases {
        let banner = format!("LLVM (http://llvm.org/):\n  LLVM version {full}\n");
        assert_eq!(version_of(&banner), (major, full.to_owned(), unreleased), "{full}");
    }
}

#[test]
fn a2_an_unreleased_llc_is_flagged() {
    let world = World::new();
    world.tool("bin/llc-22", "22.0.0git");
    world.tool("bin/opt-22", "22.0.0git");
    assert_eq!(
        world.find().llc.decision.notes,
        ["22.0.0git is not a release: its PTX may differ from what LLVM 22 gives"]
    );
}

#[test]
fn a3_numbers_are_compared_as_numbers() {
    for (full, major) in [("9.0", 9), ("22", 22), ("100.0.0", 100), ("2.2", 2)] {
        assert_eq!(version_of(&format!("LLVM version {full}\n")).0, major);
    }
    let version: LlvmVersion = "22.1".parse().unwrap();
    assert_eq!((version.minor, version.patch), (Some(1), None));
    // `2` and `220` must not satisfy `22`.
    for bad in ["2.2", "220.1.0", "2"] {
        let world = World::new();
        world.tool("bin/llc-22", bad);
        world.tool("bin/opt", bad);
        assert!(world.find().llc.value.is_none(), "{bad}");
    }
    for bad in ["", "LLVM version", "LLVM version \n", "LLVM version x", "LLVM version 99999999999", "gcc 12"]
    {
        assert!(parse_banner(bad).is_err(), "{bad}");
    }
}

#[test]
fn a4_an_llc_without_nvptx64_is_skipped_or_refused() {
    let x86 = "    x86    - 32-bit X86: Pentium-Pro and above\n    x86-64 - 64-bit X86: EM64T and AMD64\n";
    let narrow = "    nvptx - NVIDIA PTX 32-bit\n";
    for targets in [x86, narrow] {
        let mut world = World::new();
        fake(world.folder.path(), "bin/llc-22", "LLVM version 22.1.0", targets);
        world.tool("bin/llc", "22.1.8");
        world.tool("bin/opt", "22.1.8");
        assert_eq!(world.chosen().llc.path, world.at("bin/llc"));
        assert_eq!(
            world.reasons(&world.find().llc.decision),
            [
                "bin/llc-22 [PATH] rejected: LLVM version 22.1.0 was built without the target nvptx64",
                "bin/llc [PATH] chosen"
            ]
        );
        world.set("CUDA_OXIDE_LLC", world.at("bin/llc-22"));
        let error = world.find().llc.require().unwrap_err();
        assert_eq!((error.code().id, error.exit().status()), ("KILN-0314", 70));
    }
}

#[test]
fn a5_bare_llc_of_another_major_is_not_chosen() {
    let world = World::new();
    world.tool("bin/llc", "14.0.6");
    world.tool("bin/opt", "14.0.6");
    world.tool("bin/llc-22", "22.1.8");
    world.tool("bin/opt-22", "22.1.8");
    let tools = world.chosen();
    assert_eq!(tools.llc.path, world.at("bin/llc-22"));
    assert_eq!(tools.opt.path, world.at("bin/opt-22"));
    assert_eq!(
        world.reasons(&world.find().llc.decision),
        [
            "bin/llc-22 [PATH] chosen",
            "bin/llc [PATH] rejected: is LLVM 14 (Debian LLVM version 14.0.6); verified: 22"
        ]
    );
}

#[test]
fn a5_bare_llc_of_the_verified_major_is_chosen() {
    let world = World::new();
    world.tool("bin/llc", "22.1.8");
    world.tool("bin/opt", "22.1.8");
    assert_eq!(world.chosen().llc.path, world.at("bin/llc"));
}

#[test]
fn a5_a_file_called_llc_22_that_reports_14_is_rejected() {
    let mut world = World::new();
    world.tool("bin/llc-22", "14.0.6");
    world.tool("bin/opt-22", "14.0.6");
    let choice = world.find();
    assert_eq!(
        world.reasons(&choice.llc.decision),
        ["bin/llc-22 [PATH] rejected: is LLVM 14 (Debian LLVM version 14.0.6); verified: 22"]
    );
    world.set("CUDA_OXIDE_LLC", world.at("bin/llc-22"));
    let error = world.find().llc.require().unwrap_err();
    assert_eq!(error.exit().status(), 70);
    assert_eq!(
        error.message(),
        format!(
            "CUDA_OXIDE_LLC is {}: it is LLVM 14 (Debian LLVM version 14.0.6), and PROVENANCE verifies 22",
            world.at("bin/llc-22").display()
        )
    );
}

#[test]
fn a5_the_preferred_major_wins_over_order_and_others_are_taken_without_it() {
    let mut world = World::new();
    world.request.verified = vec![LlvmMajor(21), LlvmMajor(22)];
    world.request.toolchain = Some(toolchain(&world, "21.1.8"));
    world.tool("bin/llc-22", "22.1.8");
    world.tool("bin/opt-22", "22.1.8");
    let choice = world.find();
    assert_eq!(choice.llc.value.unwrap().llc.path, world.at("bin/llc-22"));
    assert_eq!(
        world.reasons(&choice.llc.decision),
        [
            "sysroot/lib/rustlib/h/bin/llc [the toolchain's llvm-tools] rejected: qualifies (Debian LLVM version 21.1.8), but bin/llc-22 comes first",
            "bin/llc-22 [PATH] chosen",
        ]
    );
    fs_err::remove_file(world.at("bin/llc-22")).unwrap();
    assert_eq!(world.chosen().llc.version.major, LlvmMajor(21));
}

fn toolchain(world: &World, version: &str) -> Toolchain {
    world.tool("sysroot/lib/rustlib/h/bin/llc", version);
    world.tool("sysroot/lib/rustlib/h/bin/opt", version);
    Toolchain {
        name: Some("1.95.0".into()),
        sysroot: world.at("sysroot"),
        host: "h".into(),
        llvm: Some(version.parse().unwrap()),
    }
}

#[test]
fn a6_llc_of_another_major_than_rustc_is_shown_and_follows_the_policy() {
    let mut world = World::new();
    world.request.toolchain = Some(toolchain(&world, "23.1.1-rust-1.100.0-nightly"));
    // Not verified: nothing qualifies, however well it fits rustc.
    let choice = world.find();
    assert!(choice.llc.value.is_none());
    assert_eq!(
        world.reasons(&choice.llc.decision)[0],
        "sysroot/lib/rustlib/h/bin/llc [the toolchain's llvm-tools] rejected: is LLVM 23 (Debian LLVM version 23.1.1-rust-1.100.0-nightly); verified: 22"
    );
    world.tool("bin/llc-22", "22.1.8");
    world.tool("bin/opt-22", "22.1.8");
    assert_eq!(
        world.find().llc.decision.notes,
        [
            "rustc is built with LLVM 23.1.1-rust-1.100.0-nightly and llc is LLVM 22.1.8; PROVENANCE verifies that llc"
        ]
    );
}

#[test]
fn a7_a_broken_toolchain_llc_is_reported_and_the_next_one_taken() {
    let mut world = World::new();
    world.request.toolchain = Some(toolchain(&world, "22.1.2"));
    script(
        world.folder.path(),
        "sysroot/lib/rustlib/h/bin/llc",
        "echo 'error while loading shared libraries: libLLVM.so.22.1' >&2; exit 127",
    );
    world.tool("bin/llc-22", "22.1.8");
    world.tool("bin/opt-22", "22.1.8");
    let choice = world.find();
    assert_eq!(choice.llc.value.as_ref().unwrap().llc.path, world.at("bin/llc-22"));
    let reason = &world.reasons(&choice.llc.decision)[0];
    assert!(reason.contains("found but not runnable"), "{reason}");
    assert!(reason.contains("libLLVM.so.22.1"), "{reason}");
    assert!(reason.ends_with("LD_LIBRARY_PATH was not set"), "{reason}");
}

#[test]
fn a9_tools_are_probed_without_what_cargo_run_adds() {
    let mut world = World::new();
    let body = banner_text("LLVM version 22.1.8", PTX);
    for name in ["bin/llc-22", "bin/opt-22"] {
        script(
            world.folder.path(),
            name,
            &format!("[ -n \"${{LD_LIBRARY_PATH+set}}\" ] && exit 127\nprintf %s '{body}'"),
        );
    }
    world.set("LD_LIBRARY_PATH", "/w/target/debug/deps:/w/target/debug::/r/toolchains/x/lib");
    assert_eq!(world.chosen().llc.path, world.at("bin/llc-22"));
}

#[test]
fn a10_an_explicit_llc_is_made_absolute_and_never_skipped() {
    let mut world = World::new();
    world.tool("tools/llc", "22.1.8");
    world.tool("tools/opt", "22.1.8");
    world.tool("a b/ü/llc", "22.1.8");
    world.tool("a b/ü/opt", "22.1.8");
    world.tool("bin/llc-22", "22.1.8");
    world.tool("bin/opt-22", "22.1.8");
    for (value, path) in
        [("tools/llc", "tools/llc"), ("./tools/llc", "tools/llc"), ("a b/ü/llc", "a b/ü/llc")]
    {
        world.set("CUDA_OXIDE_LLC", value);
        assert_eq!(world.chosen().llc.path.as_os_str(), world.at(path).as_os_str());
    }
    for bad in ["tools", "none", "~/llc", "tools/llc\n", "tools/llc "] {
        world.set("CUDA_OXIDE_LLC", bad);
        let choice = world.find();
        let error = choice.llc.require().unwrap_err();
        assert_eq!(error.exit().status(), 1, "{bad}");
        assert!(error.hint_text().is_some(), "{bad}");
        assert_eq!(choice.llc.decision.candidates.len(), 1, "{bad}");
    }
    world.set("CUDA_OXIDE_LLC", "");
    assert_eq!(world.chosen().llc.path, world.at("bin/llc-22"));
}

#[test]
fn a12_nothing_at_all_says_what_is_missing_and_one_command() {
    let mut world = World::new();
    world.variables.clear();
    world.request.toolchain = Some(Toolchain {
        name: Some("1.95.0".into()),
        sysroot: world.at("sysroot"),
        host: "h".into(),
        llvm: None,
    });
    let choice = world.find();
    let error = choice.llc.require().unwrap_err();
    let text = format!("{error}\nhint: {}", error.hint_text().unwrap());
    assert_eq!(error.exit().status(), 1);
    assert_eq!(
        text.replace(&world.folder.path().display().to_string(), "/t"),
        "no llc of LLVM 22 that makes PTX for nvptx64 was found in the toolchain's llvm-tools, on PATH or in the \
             usual folders, and CUDA_OXIDE_LLC is not set\n  \
             caused by: /t/sysroot/lib/rustlib/h/bin/llc: not there: the toolchain has no llvm-tools with an llc\n\
             hint: rustup component add llvm-tools --toolchain 1.95.0, or install LLVM 22 (Debian, Ubuntu: apt \
             install llvm-22; Homebrew: brew install llvm@22), or set CUDA_OXIDE_LLC to the path of its llc"
    );
}

#[test]
fn a5_the_flag_takes_a_verified_major_or_a_path_and_wins_over_the_variable() {
    let mut world = World::new();
    let (new, old) = (world.tool("bin/llc-22", "22.1.8"), world.tool("bin/llc-21", "21.1.8"));
    world.tool("bin/opt-22", "22.1.8");
    world.tool("bin/opt-21", "21.1.8");
    world.set("PATH", world.at("bin"));
    world.request.verified = vec![LlvmMajor(22), LlvmMajor(21)];
    world.request.llc = Explicit::of("X", &Env::of([("X", "/none")], "/"), &BTreeMap::new());
    let asked = |value: &str| {
        let mut request = world.request.clone();
        request.narrow(OsStr::new(value)).map(|()| find_llc(&request, &world.env()).llc)
    };
    let resolved = asked("21").unwrap();
    assert_eq!(resolved.require().unwrap().llc.path, old);
    assert_eq!(
        resolved.decision.why,
        "the first candidate of LLVM 21, the major that --llc asks for, that makes PTX and has an opt"
    );
    let path = new.display().to_string();
    assert_eq!(asked(&path).unwrap().require().unwrap().llc.path, new);
    let error = asked("23").unwrap_err();
    assert_eq!((error.code().id, error.exit().status()), ("KILN-0313", 70));
    assert_eq!(error.message(), "--llc 23 asks for LLVM 23, and PROVENANCE verifies 22, 21");
    let missing = asked("llc-24").unwrap().require().unwrap_err();
    assert!(missing.message().starts_with("--llc is \"llc-24\""), "{missing}");
    fs_err::remove_file(&old).unwrap();
    let error = asked("21").unwrap().require().unwrap_err();
    assert_eq!(error.code().id, "KILN-0312");
    assert!(error.message().ends_with("or in the usual folders"), "{error}");
}

#[test]
fn a13_variables_in_the_config_file_count_after_the_environment() {
    let settings = BTreeMap::from([("CUDA_OXIDE_LLC".to_owned(), "/f/llc".to_owned())]);
    let from_file = Explicit::of("CUDA_OXIDE_LLC", &Env::of::<&str, &str>([], "/"), &settings).unwrap();
    assert_eq!(from_file.from, "CUDA_OXIDE_LLC in .cargo/cuda-oxide.toml");
    let both = Explicit::of("CUDA_OXIDE_LLC", &Env::of([("CUDA_OXIDE_LLC", "/e")], "/"), &settings).unwrap();
    assert_eq!(both.value, "/e");
}

#[test]
fn a14_an_opt_of_another_major_is_refused() {
    let mut world = World::new();
    world.tool("bin/llc-22", "22.1.8");
    world.tool("bin/opt-22", "22.1.8");
    world.tool("bin/opt-21", "21.1.8");
    world.set("CUDA_OXIDE_LLC", world.at("bin/llc-22"));
    world.set("CUDA_OXIDE_OPT", world.at("bin/opt-21"));
    let error = world.find().llc.require().unwrap_err();
    assert_eq!((error.code().id, error.exit().status()), ("KILN-0315", 70));
    assert_eq!(
        error.message().replace(&world.folder.path().display().to_string(), "/t"),
        "CUDA_OXIDE_OPT is /t/bin/opt-21: it is LLVM 21 (Debian LLVM version 21.1.8), and llc is /t/bin/llc-22 \
             (Debian LLVM version 22.1.8)"
    );
    // The same without an explicit llc.
    world.set("CUDA_OXIDE_LLC", "");
    assert_eq!(world.find().llc.require().unwrap_err().code().id, "KILN-0315");
}

#[test]
fn a14_no_opt_anywhere_is_refused_with_all_candidates() {
    let mut world = World::new();
    world.tool("bin/llc-22", "22.1.8");
    world.tool("bin/opt-22", "21.1.8");
    for explicit in ["", "bin/llc-22"] {
        world.set("CUDA_OXIDE_LLC", explicit);
        let choice = world.find();
        let error = choice.llc.require().unwrap_err();
        assert_eq!((error.code().id, error.exit().status()), ("KILN-0315", 70), "{error}");
        assert_eq!(
            error.to_string().replace(&world.folder.path().display().to_string(), "/t"),
            "no opt of LLVM 22, the major of /t/bin/llc-22, was found\n  \
                 caused by: /t/bin/opt-22: is LLVM 21 (Debian LLVM version 21.1.8); llc is LLVM 22"
        );
    }
}

#[test]
fn a14_an_llc_with_an_opt_is_taken_over_one_without() {
    let mut world = World::new();
    world.request.verified = vec![LlvmMajor(22), LlvmMajor(21)];
    world.tool("bin/llc-22", "22.1.8");
    world.tool("bin/llc-21", "21.1.8");
    world.tool("bin/opt", "21.1.8");
    let choice = world.find();
    assert_eq!(choice.llc.value.unwrap().llc.path, world.at("bin/llc-21"));
    assert_eq!(
        world.reasons(&choice.llc.decision)[0],
        "bin/llc-22 [PATH] rejected: no opt of LLVM 22, the major of bin/llc-22, was found; bin/opt: is LLVM 21 \
             (Debian LLVM version 21.1.8); llc is LLVM 22"
    );
}

#[test]
fn a14_an_opt_in_a_usual_folder_serves_any_llc_of_its_major() {
    let mut world = World::new();
    world.request.folders = vec![world.at("usual/bin")];
    world.tool("bin/llc-22", "22.1.8");
    world.tool("usual/bin/llc", "22.1.7");
    let opt = world.tool("usual/bin/opt", "22.1.7");
    let choice = world.find();
    assert_eq!(choice.llc.value.unwrap().opt.path, opt);
    assert_eq!(choice.opt.notes, ["opt is 22.1.7 and llc is 22.1.8, both LLVM 22"]);
}

#[test]
fn a15_a_wrapper_is_run_as_given_and_both_paths_are_recorded() {
    let mut world = World::new();
    let real = script(
        world.folder.path(),
        "real/llc",
        &format!(
            "[ \"$LD_LIBRARY_PATH\" = /priv ] || exit 127\nprintf %s '{}'",
            banner_text("LLVM version 22.1.8", PTX)
        ),
    );
    let wrapper = script(
        world.folder.path(),
        "bin/llc-22",
        &format!("LD_LIBRARY_PATH=/priv exec {} \"$@\"", real.display()),
    );
    symlink(&wrapper, world.at("llc-link")).unwrap();
    world.tool("bin/opt-22", "22.1.8");
    assert_eq!(world.chosen().llc.path, wrapper);
    world.set("CUDA_OXIDE_LLC", "llc-link");
    let tool = world.chosen().llc;
    assert_eq!(tool.path, world.at("llc-link"));
    assert_eq!(tool.realpath, fs_err::canonicalize(&wrapper).unwrap());
}

#[test]
fn a15_a_dispatcher_by_its_own_name_works_and_links_are_not_probed_twice() {
    let world = World::new();
    script(
        world.folder.path(),
        "launcher",
        &format!(
            "case \"${{0##*/}}\" in llc-22|opt-22) v=22.1.8;; *) v=14.0.6;; esac\necho \"Debian LLVM version $v\"\nprintf %s '{}'",
            banner_text("", PTX)
        ),
    );
    fs_err::create_dir_all(world.at("bin")).unwrap();
    for name in ["llc", "llc-22", "opt-22"] {
        symlink("../launcher", world.at("bin").join(name)).unwrap();
    }
    let choice = world.find();
    assert_eq!(choice.llc.value.unwrap().llc.path, world.at("bin/llc-22"));
    let reasons = world.reasons(&choice.llc.decision);
    assert!(reasons[1].starts_with("bin/llc [PATH] rejected: is LLVM 14"), "{reasons:?}");

    let mut world = World::new();
    world.tool("llvm/bin/llc", "22.1.8");
    world.tool("llvm/bin/opt", "22.1.8");
    fs_err::create_dir_all(world.at("bin")).unwrap();
    symlink("../llvm/bin/llc", world.at("bin/llc-22")).unwrap();
    let bin = world.at("bin").display().to_string();
    world.set("PATH", format!("{bin}::{bin}"));
    world.request.folders = vec![world.at("llvm/bin")];
    assert_eq!(
        world.reasons(&world.find().llc.decision),
        [
            "bin/llc-22 [PATH] chosen".to_owned(),
            "llvm/bin/llc [usual install folders] not tried: the same file as bin/llc-22".to_owned(),
        ]
    );
}

#[test]
fn another_llc_at_the_same_path_is_another_identity() {
    let world = World::new();
    world.tool("bin/llc-22", "22.1.8");
    world.tool("bin/opt-22", "22.1.8");
    let before = world.chosen();
    assert_eq!(before.llc.identity(), world.chosen().llc.identity());
    world.tool("bin/llc-22", "22.1.9");
    assert_ne!(world.chosen().llc.identity(), before.llc.identity());
    assert_eq!(world.chosen().opt, before.opt);
}

#[test]
fn something_else_called_llc_is_rejected() {
    let mut world = World::new();
    let other = executable(world.folder.path(), "bin/llc", "#!/bin/sh\necho Lua 5.4\n");
    world.set("CUDA_OXIDE_LLC", &other);
    let error = world.find().llc.require().unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "CUDA_OXIDE_LLC names an llc that cannot be used\n  caused by: {}: no `LLVM version` in what it \
                 printed, which starts with: Lua 5.4",
            other.display()
        )
    );
}

proptest! {
    #[test]
    fn no_banner_panics(text in "\\PC*|(LLVM version |[0-9]{1,12}|[.]|git|rc|[ \n-]|Registered Targets:\n)*") {
        if let Ok(banner) = parse_banner(&text) {
            prop_assert!(banner.version.full.starts_with(|c: char| c.is_ascii_digit()));
        }
    }
}
