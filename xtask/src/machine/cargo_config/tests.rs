use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::symlink;
use std::sync::LazyLock;

use insta::assert_snapshot;

use super::*;

/// A workspace `outer/app` below a temporary folder, with its own Cargo home.
struct Case {
    folder: tempfile::TempDir,
    variables: Vec<(String, OsString)>,
}

/// The host triple of the compiler that runs the tests.
static TRIPLE: LazyLock<String> = LazyLock::new(|| {
    let output = Command::new(rustc()).arg("-vV").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("host: ")).unwrap().to_owned()
});

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(folder.path().join("outer/app")).unwrap();
        let home = folder.path().join("home").into_os_string();
        Case { folder, variables: vec![("CARGO_HOME".to_owned(), home)] }
    }

    /// Writes `text` to `path` below the folder; `TRIPLE` stands for the host's.
    fn file(self, path: &str, text: &str) -> Self {
        let path = self.folder.path().join(path);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, text.replace("TRIPLE", &TRIPLE)).unwrap();
        self
    }

    fn app(self, text: &str) -> Self {
        self.file("outer/app/.cargo/config.toml", text)
    }

    fn var(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.variables.push((name.replace("TRIPLE", &TRIPLE.to_uppercase().replace('-', "_")), value.into()));
        self
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("outer/app")
    }

    fn env(&self) -> Env {
        Env::of(self.variables.iter().map(|(name, value)| (name, value)), self.folder.path())
    }

    fn resolve(&self) -> Result<HostFlags> {
        host_flags(&self.root(), &self.env(), &rustc(), &TRIPLE)
    }

    fn shown(&self, text: &str) -> String {
        let folder = self.folder.path().canonicalize().unwrap();
        text.replace(&folder.display().to_string(), "[]").replace(TRIPLE.as_str(), "TRIPLE")
    }

    /// The flags, joined by spaces, `--cfg` left out.
    fn flags(&self) -> String {
        let resolved = self.resolve().unwrap();
        let joined: Vec<_> = resolved.origin.iter().flat_map(|origin| origin.flags.clone()).collect();
        assert_eq!(joined, resolved.flags);
        let words: Vec<_> = resolved.flags.into_iter().filter(|flag| flag != "--cfg").collect();
        words.join(" ")
    }

    fn warnings(&self) -> String {
        self.shown(&self.resolve().unwrap().warnings.join("\n"))
    }

    fn error(&self) -> String {
        let error = self.resolve().unwrap_err();
        self.shown(&format!("{}: {error}\nhint: {}", error.code().id, error.hint_text().unwrap_or_default()))
    }
}

fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

fn rustc() -> PathBuf {
    let beside = cargo().with_file_name("rustc");
    if beside.is_file() { beside } else { PathBuf::from("rustc") }
}

fn array(flag: &str) -> String {
    format!("[build]\nrustflags = ['--cfg', '{flag}']\n")
}

fn string(flag: &str) -> String {
    format!("[build]\nrustflags = '--cfg {flag}'\n")
}

const TRIPLE_AND_CFG_AND_BUILD: &str = "
[build]
rustflags = ['--cfg', 'c']
[target.'cfg(unix)']
rustflags = ['--cfg', 'b']
[target.TRIPLE]
rustflags = ['--cfg', 'a']
";

const CFG_TABLES: &str = "
[target.'cfg(all())']
rustflags = '--cfg all'
[target.'cfg(any())']
rustflags = '--cfg any'
[target.'cfg(debug_assertions)']
rustflags = '--cfg da'
[target.'cfg(feature=\"x\")']
rustflags = '--cfg fx'
[target.'cfg(not(windows))']
rustflags = '--cfg nw'
[target.'cfg(']
rustflags = '--cfg broken'
[target.'cfg(unix']
rustflags = '--cfg broken'
";

const FEATURE_BY_FLAG: &str = "
[target.TRIPLE]
rustflags = ['-Ctarget-feature=+avx2']
[target.'cfg(target_feature=\"avx2\")']
rustflags = ['--cfg', 'avx']
";

const PARADOX: &str = "
[build]
rustflags = '--cfg foo'
[target.'cfg(foo)']
rustflags = '--cfg bar'
";

/// What the installed Cargo itself gives to rustc.
fn oracle(case: &Case) -> String {
    let root = case.root();
    fs_err::create_dir_all(root.join("src")).unwrap();
    fs_err::write(root.join("src/lib.rs"), "").unwrap();
    let manifest = "[package]\nname = \"app\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n";
    fs_err::write(root.join("Cargo.toml"), manifest).unwrap();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = vec![cargo().parent().unwrap().to_owned()];
    folders.extend(std::env::split_paths(&path));
    let mut command = Command::new(cargo());
    command.args(["check", "-v", "--offline"]).current_dir(&root).env_clear();
    command.env("PATH", std::env::join_paths(folders).unwrap());
    command.env("CARGO_TARGET_DIR", case.folder.path().join("target"));
    let output = command.envs(case.variables.iter().cloned()).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    let line = log.lines().find(|line| line.contains("Running `")).unwrap();
    let (_, after) = line.rsplit_once("-L dependency=").unwrap();
    let words = after.trim_end_matches('`').split(' ').skip(1).filter(|word| *word != "--cfg");
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn cargo_itself_uses_the_same_flags() {
    let app = |text: &str| Case::new().app(text);
    let parent = "outer/.cargo/config.toml";
    let rows = [
        ("a b", app(TRIPLE_AND_CFG_AND_BUILD)),
        ("e", app(&array("b")).var("CARGO_ENCODED_RUSTFLAGS", "--cfg\x1fe").var("RUSTFLAGS", "--cfg r")),
        ("", app(&array("b")).var("RUSTFLAGS", "")),
        ("h p t", app(&array("t")).file(parent, &array("p")).file("home/config.toml", &array("h"))),
        ("t", app(&string("t")).file(parent, &string("p"))),
        (
            "i b",
            app(&format!("include = ['i.toml']\n{}", array("b")))
                .file("outer/app/.cargo/i.toml", &array("i")),
        ),
        ("all da nw", app(CFG_TABLES)),
        ("-Ctarget-feature=+avx2 avx", app(FEATURE_BY_FLAG)),
        ("bar", app(PARADOX)),
        ("a v b", app(TRIPLE_AND_CFG_AND_BUILD).var("CARGO_TARGET_TRIPLE_RUSTFLAGS", "--cfg v")),
        ("b v", app(&string("b")).var("CARGO_BUILD_RUSTFLAGS", "--cfg v")),
        ("l", app(&array("t")).file("outer/app/.cargo/config", &array("l"))),
    ];
    for (number, (expected, case)) in rows.into_iter().enumerate() {
        // Another architecture does not have the feature that the row needs.
        if expected.contains("avx2") && !TRIPLE.starts_with("x86_64") {
            continue;
        }
        assert_eq!(case.flags(), expected, "row {number}, kiln");
        assert_eq!(oracle(&case), expected, "row {number}, Cargo");
    }
}

#[test]
fn b4_encoded_flags_win_and_give_no_empty_argument() {
    let case = Case::new().var("RUSTFLAGS", "--cfg plain");
    assert_eq!(case.flags(), "plain");
    let case = case.var("CARGO_ENCODED_RUSTFLAGS", "--cfg\x1fa b\x1f");
    assert_eq!(case.resolve().unwrap().flags, ["--cfg", "a b"]);
    assert_snapshot!(case.warnings(), @"CARGO_ENCODED_RUSTFLAGS: an empty flag is left out; Cargo would fail on it");
}

#[test]
fn b4_variables_that_are_empty_or_not_utf8() {
    let case = Case::new().app(&array("b")).var("CARGO_ENCODED_RUSTFLAGS", "").var("RUSTFLAGS", "--cfg x");
    assert_eq!(case.flags(), "");
    assert_snapshot!(case.warnings(), @"CARGO_ENCODED_RUSTFLAGS is set and empty: Cargo ignores every `rustflags` of its config files");
    let case = Case::new().app(&array("b")).var("RUSTFLAGS", OsString::from_vec(b"--cfg \xff".to_vec()));
    assert_eq!(case.flags(), "b");
    assert_snapshot!(case.warnings(), @"RUSTFLAGS is not UTF-8: Cargo ignores it");
    let case = Case::new().app(&array("b")).var("CARGO_TARGET_TRIPLE_RUSTFLAGS", "");
    assert_eq!(case.flags(), "b");
}

#[test]
fn b4_plain_flags_are_split_at_spaces_alone() {
    let case = Case::new().var("RUSTFLAGS", "  -Copt-level=1\n  -Ca\tb ");
    assert_eq!(case.resolve().unwrap().flags, ["-Copt-level=1", "-Ca\tb"]);
}

#[test]
fn b5_config_flags_are_listed_in_order_with_their_place() {
    let flags = ["-C", "target-cpu=x86-64-v3", "-C", "link-arg=-fuse-ld=lld"];
    let case = Case::new().app(&format!("[target.TRIPLE]\nrustflags = {flags:?}\n"));
    let resolved = case.resolve().unwrap();
    assert_eq!(resolved.flags, flags);
    assert_eq!(resolved.origin.len(), 1);
    let shown = case.shown(&resolved.origin[0].to_string());
    assert_eq!(shown, "[]/outer/app/.cargo/config.toml `target.TRIPLE.rustflags`");
    assert_eq!(resolved.warnings, Vec::<String>::new());
}

#[test]
fn b6_triple_and_cfg_are_joined_and_build_is_the_alternative() {
    assert_eq!(Case::new().app(TRIPLE_AND_CFG_AND_BUILD).flags(), "a b");
    for without in ["rustflags = []", "linker = 'cc'"] {
        let text = format!("[target.TRIPLE]\n{without}\n{}", array("c"));
        assert_eq!(Case::new().app(&text).flags(), "c", "{without}");
    }
    let other = "[target.wasm32-unknown-unknown]\nrustflags = ['--cfg', 'w']\n";
    assert_eq!(Case::new().app(other).flags(), "");
}

#[test]
fn b7_cfg_tables_are_evaluated_by_rustc() {
    assert_eq!(Case::new().app(CFG_TABLES).flags(), "all da nw");
}

#[test]
fn b7_a_table_that_is_no_cfg_expression_is_named() {
    let case = Case::new().app("[target.'cfg(']\nrustflags = ['x']\n[target.'cfg(a b)']\nrustflags = 'y'\n");
    assert_eq!(case.flags(), "");
    assert_snapshot!(case.warnings(), @"
        []/outer/app/.cargo/config.toml `target.'cfg('.rustflags`: not a valid cfg expression, so Cargo ignores the table
        []/outer/app/.cargo/config.toml `target.'cfg(a b)'.rustflags`: not a valid cfg expression, so Cargo ignores the table
        ");
}

#[test]
fn b7_tables_that_depend_on_their_own_flags_are_named() {
    let case = Case::new().app(PARADOX);
    assert_eq!(case.flags(), "bar");
    assert_snapshot!(case.warnings(), @"the cfg tables of Cargo's config files depend on their own flags; Cargo stops after two rounds");
}

#[test]
fn b7_rustc_runs_only_when_a_cfg_table_has_flags() {
    let nowhere = Path::new("/no/such/rustc");
    let case = Case::new().app(&format!("[target.'cfg(unix)']\nlinker = 'cc'\n{}", array("b")));
    let resolved = host_flags(&case.root(), &case.env(), nowhere, &TRIPLE).unwrap();
    assert_eq!(resolved.flags, ["--cfg", "b"]);
    let case = Case::new().app(TRIPLE_AND_CFG_AND_BUILD);
    let error = host_flags(&case.root(), &case.env(), nowhere, &TRIPLE).unwrap_err();
    assert_snapshot!(case.shown(&error.to_string()), @r#"
        `/no/such/rustc --print=cfg` could not be started: No such file or directory (os error 2)
          caused by: host flags ["--cfg", "a"] from []/outer/app/.cargo/config.toml `target.TRIPLE.rustflags`
        "#);
}

#[test]
fn b7_flags_that_rustc_refuses_are_named() {
    let text = "[target.TRIPLE]\nrustflags = ['-Cno-such=1']\n[target.'cfg(unix)']\nrustflags = '--cfg b'\n";
    let case = Case::new().app(text);
    assert_snapshot!(case.error().replace(&case.shown(&rustc().display().to_string()), "rustc"), @r#"
        KILN-0212: `rustc --print=cfg` failed: error: unknown codegen option: `no-such`
          caused by: host flags ["-Cno-such=1"] from []/outer/app/.cargo/config.toml `target.TRIPLE.rustflags`
        hint: mend the flag, or the path of rustc
        "#);
}

#[test]
fn b8_strings_are_split_at_white_space_and_elements_are_kept() {
    let case = Case::new().app("[build]\nrustflags = \"-C target-cpu=native  --cfg\\ts\"\n");
    assert_eq!(case.resolve().unwrap().flags, ["-C", "target-cpu=native", "--cfg", "s"]);
    let flags = ["-Clink-arg=-L/opt/my libs", "-C target-cpu=native"];
    let case = Case::new().app(&format!("[build]\nrustflags = {flags:?}\n"));
    assert_eq!(case.resolve().unwrap().flags, flags);
    assert_snapshot!(case.warnings(), @r#"[]/outer/app/.cargo/config.toml `build.rustflags`: `-C target-cpu=native` is one argument with a space in it, which rustc refuses; write "-C", "target-cpu=native" as two elements"#);
}

#[test]
fn b8_quotes_in_a_string_keep_nothing_together() {
    let case = Case::new().app("[build]\nrustflags = '-Clink-arg=\"-L/my libs\" --cfg feature=\"x\"'\n");
    let flags = ["-Clink-arg=\"-L/my", "libs\"", "--cfg", "feature=\"x\""];
    assert_eq!(case.resolve().unwrap().flags, flags);
    assert_snapshot!(case.warnings(), @r#"
        []/outer/app/.cargo/config.toml `build.rustflags`: `-Clink-arg="-L/my` has half of a pair of quotes; quotes do not keep words of a string together
        []/outer/app/.cargo/config.toml `build.rustflags`: `libs"` has half of a pair of quotes; quotes do not keep words of a string together
        "#);
}

#[test]
fn b9_all_levels_are_read_parents_first() {
    let table = |flag: &str| format!("[target.TRIPLE]\nrustflags = ['--cfg', '{flag}']\n");
    let case = Case::new()
        .app(&table("t"))
        .file("outer/.cargo/config.toml", &table("p"))
        .file(".cargo/config.toml", &table("g"))
        .file("home/config.toml", &table("h"));
    assert_eq!(case.flags(), "h g p t");
}

#[test]
fn b9_a_string_and_an_array_clash_with_both_names() {
    let case = Case::new().app(&array("c")).file("outer/.cargo/config.toml", &string("p"));
    assert_snapshot!(case.error(), @"
        KILN-0211: `build.rustflags` is a string in []/outer/.cargo/config.toml and an array in []/outer/app/.cargo/config.toml; Cargo cannot merge them
        hint: write it as an array in both files
        ");
    let case = Case::new()
        .app("[target.'cfg(windows)']\nrustflags = []\n")
        .file("home/config.toml", "[target.'cfg(windows)']\nrustflags = ''\n");
    let error = case.error();
    assert!(
        error.contains("`target.'cfg(windows)'.rustflags` is a string in []/home/config.toml"),
        "{error}"
    );
}

#[test]
fn b9_a_home_that_is_also_a_parent_counts_once() {
    let case = Case::new().file("outer/.cargo/config.toml", &array("p"));
    let home = case.folder.path().join("outer/.cargo");
    let link = case.folder.path().join("link");
    symlink(&home, &link).unwrap();
    let case = case.var("CARGO_HOME", &home);
    assert_eq!(case.flags(), "p");
    assert_eq!(case.var("CARGO_HOME", link).flags(), "p");
}

#[test]
fn b10_the_file_without_an_ending_hides_the_other_one() {
    let case = Case::new().app(&array("t")).file("outer/app/.cargo/config", &array("l"));
    assert_eq!(case.flags(), "l");
    assert_snapshot!(case.warnings(), @"[]/outer/app/.cargo/config hides []/outer/app/.cargo/config.toml: Cargo reads the file without an ending");
    let case = Case::new().file("outer/app/.cargo/config", &array("l"));
    assert_eq!(case.flags(), "l");
    assert_snapshot!(case.warnings(), @"[]/outer/app/.cargo/config is an old name that Cargo warns about: rename it to config.toml");
}

#[test]
fn b10_links_between_the_two_names() {
    let case = Case::new().app(&array("t"));
    symlink("config.toml", case.root().join(".cargo/config")).unwrap();
    assert_eq!((case.flags().as_str(), case.warnings().as_str()), ("t", ""));
    let case = Case::new().file("outer/app/.cargo/config", &array("t"));
    symlink("config", case.root().join(".cargo/config.toml")).unwrap();
    assert_eq!(case.flags(), "t");
    let case = Case::new().app(&array("t"));
    fs_err::create_dir(case.root().join(".cargo/config")).unwrap();
    assert_snapshot!(case.error(), @"
        KILN-0210: []/outer/app/.cargo/config is a folder, expected a config file
        hint: remove or rename the folder
        ");
}

#[test]
fn b11_other_spellings_of_the_same_table() {
    for text in [
        "\u{feff}[target.TRIPLE]\r\nrustflags = ['--cfg', 'x']\r\n",
        "target.TRIPLE = { rustflags = ['--cfg', 'x'] }",
        "target.TRIPLE.rustflags = ['--cfg', 'x']",
        "[target.\"TRIPLE\"]\nrustflags = [\"--cfg\", \"\\u0078\"]",
        "[target]\n'TRIPLE'.rustflags = [ # one\n  '--cfg', # two\n  'x',\n]\n",
        "[target.\"cfg(all(unix, not(target_os = \\\"none\\\")))\"]\nrustflags = '''\n--cfg x'''",
    ] {
        assert_eq!(Case::new().app(text).flags(), "x", "{text}");
    }
}

#[test]
fn b11_errors_show_the_line() {
    assert_snapshot!(Case::new().app("[build]\njobs = 1\n[build]\n").error(), @"
        KILN-0210: []/outer/app/.cargo/config.toml:3:2: duplicate key
          |
        2 | jobs = 1
        3 | [build]
          |  ^^^^^
        hint: mend the file; Cargo refuses it, too
        ");
    assert_snapshot!(Case::new().app("[build]\nrustflags = [3]\n").error(), @"
        KILN-0210: []/outer/app/.cargo/config.toml:2:13: expected a string or an array of strings
          |
        1 | [build]
        2 | rustflags = [3]
          |             ^^^
        hint: mend the file; Cargo refuses it, too
        ");
    assert_snapshot!(Case::new().app("[target]\nrustflags = ['-O']\n").error(), @"
        KILN-0210: []/outer/app/.cargo/config.toml:2:13: invalid type: sequence, expected a table
          |
        1 | [target]
        2 | rustflags = ['-O']
          |             ^^^^^^
        hint: mend the file; Cargo refuses it, too
        ");
    let case = Case::new().app("");
    fs_err::write(case.root().join(".cargo/config.toml"), b"# \xff").unwrap();
    assert_snapshot!(case.error(), @"
        KILN-0210: []/outer/app/.cargo/config.toml is not UTF-8 text: wrong byte at offset 2
        hint: save the file as UTF-8
        ");
}

#[test]
fn b12_a_key_outside_of_a_table_gives_no_flags_and_a_warning() {
    let case = Case::new().app("rustflags = ['-Copt-level=3']\n");
    assert_eq!(case.flags(), "");
    assert_snapshot!(case.warnings(), @"[]/outer/app/.cargo/config.toml: `rustflags` outside of a table has no effect; did you mean `[build]`?");
}

#[test]
fn includes_are_read_before_the_file_that_names_them() {
    let include = "include = ['sub/one.toml', { path = 'none.toml', optional = true }]\n";
    let case = Case::new()
        .app(&format!("{include}{}", array("t")))
        .file(
            "outer/app/.cargo/sub/one.toml",
            &format!("include = [{{ path = 'two.toml' }}]\n{}", array("one")),
        )
        .file("outer/app/.cargo/sub/two.toml", &array("two"));
    assert_eq!(case.flags(), "two one t");
}

#[test]
fn includes_that_cargo_refuses() {
    assert_snapshot!(Case::new().app("include = ['none.toml']\n").error(), @"
        KILN-0210: []/outer/app/.cargo/config.toml:1:12: the included file cannot be read
          |
        1 | include = ['none.toml']
          |            ^^^^^^^^^^^
          caused by: failed to open file `[]/outer/app/.cargo/none.toml`: No such file or directory (os error 2)
        hint: mend the file; Cargo refuses it, too
        ");
    assert_snapshot!(Case::new().app("include = ['none']\n").error(), @"
        KILN-0210: []/outer/app/.cargo/config.toml:1:12: the path of an include must end in `.toml`
          |
        1 | include = ['none']
          |            ^^^^^^
        hint: mend the file; Cargo refuses it, too
        ");
    assert_snapshot!(Case::new().app("include = ['../.cargo/config.toml']\n").error(), @"
        KILN-0210: []/outer/app/.cargo/config.toml:1:12: this file is included twice, or includes itself
          |
        1 | include = ['../.cargo/config.toml']
          |            ^^^^^^^^^^^^^^^^^^^^^^^
        hint: mend the file; Cargo refuses it, too
        ");
    assert_snapshot!(Case::new().app("include = 'none.toml'\n").error(), @r#"
        KILN-0210: []/outer/app/.cargo/config.toml:1:11: invalid type: string "none.toml", expected a sequence
          |
        1 | include = 'none.toml'
          |           ^^^^^^^^^^^
        hint: mend the file; Cargo refuses it, too
        "#);
}

#[test]
fn b15_overrides_are_listed_with_the_one_that_wins() {
    let case = Case::new()
        .app("[build]\nrustc-wrapper = 'tools/w'\nrustc = 'my-rustc'\n")
        .file("home/config.toml", "[build]\nrustc-wrapper = 'sccache'\n")
        .file("outer/app/tools/w", "")
        .var("RUSTC_WRAPPER", "./no/such")
        .var("RUSTC_WORKSPACE_WRAPPER", "")
        .var("CARGO_BUILD_RUSTC", "/no/such/rustc");
    let env = case.env();
    let line = |found: &Override| {
        format!(
            "{} {:?}: {} {} = {:?} -> {:?}, {}",
            if found.effective { "*" } else { "-" },
            found.setting,
            found.place,
            found.key,
            found.value,
            found.program,
            found.problem.as_deref().unwrap_or("fine"),
        )
    };
    let overrides = CargoConfig::load(&case.root(), &env).unwrap().overrides();
    let lines: Vec<_> = overrides.iter().map(line).collect();
    assert_snapshot!(case.shown(&lines.join("\n")), @r#"
        * Rustc: CARGO_BUILD_RUSTC CARGO_BUILD_RUSTC = "/no/such/rustc" -> "/no/such/rustc", /no/such/rustc does not exist or is not a file
        - Rustc: []/outer/app/.cargo/config.toml build.rustc = "my-rustc" -> "my-rustc", is not on PATH
        * RustcWrapper: RUSTC_WRAPPER RUSTC_WRAPPER = "./no/such" -> "[]/no/such", []/no/such does not exist or is not a file
        - RustcWrapper: []/outer/app/.cargo/config.toml build.rustc-wrapper = "tools/w" -> "[]/outer/app/tools/w", fine
        - RustcWrapper: []/home/config.toml build.rustc-wrapper = "sccache" -> "sccache", is not on PATH
        * RustcWorkspaceWrapper: RUSTC_WORKSPACE_WRAPPER RUSTC_WORKSPACE_WRAPPER = "" -> "", fine
        "#);
}

#[test]
fn b18_the_workspace_root_counts_and_not_the_working_folder() {
    let case = Case::new().app(&array("root")).file("outer/app/sub/.cargo/config.toml", &array("sub"));
    let env = Env::of(case.variables.iter().map(|(name, value)| (name, value)), case.root().join("sub"));
    let resolved = host_flags(&case.root(), &env, &rustc(), &TRIPLE).unwrap();
    assert_eq!(resolved.flags, ["--cfg", "root"]);
}

#[test]
fn g1_folders_with_spaces_and_other_letters() {
    let text = "[target.'cfg(unix)']\nrustflags = ['-Clink-arg=-L/a b/ü']\n";
    let case = Case::new().file("outer/app/a b/ü/.cargo/config.toml", text);
    let root = case.root().join("a b/ü");
    let resolved = host_flags(&root, &case.env(), &rustc(), &TRIPLE).unwrap();
    assert_eq!(resolved.flags, ["-Clink-arg=-L/a b/ü"]);
    assert_eq!(resolved.warnings, Vec::<String>::new());
}

#[test]
fn g2_a_relative_home_starts_at_the_working_folder_and_an_empty_one_is_unset() {
    let case = Case::new().file("home/config.toml", &array("h")).file("user/.cargo/config.toml", &array("u"));
    let user = case.folder.path().join("user");
    let case = case.var("HOME", user).var("CARGO_HOME", "home");
    assert_eq!(case.flags(), "h");
    let mut case = case.var("CARGO_HOME", "");
    assert_eq!(case.flags(), "u");
    case.variables.retain(|(name, _)| name != "HOME");
    assert_eq!(case.flags(), "");
    assert_snapshot!(case.warnings(), @"neither CARGO_HOME nor HOME is set: no config file of a home folder is read");
}

#[test]
fn g7_a_linked_checkout_uses_its_physical_parents() {
    let case = Case::new()
        .app(&array("app"))
        .file("outer/.cargo/config.toml", &array("real"))
        .file("other/.cargo/config.toml", &array("link"));
    let link = case.folder.path().join("other/app");
    symlink(case.root(), &link).unwrap();
    let resolved = host_flags(&link, &case.env(), &rustc(), &TRIPLE).unwrap();
    assert_eq!(resolved.flags, ["--cfg", "real", "--cfg", "app"]);
}
