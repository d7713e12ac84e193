use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use insta::assert_snapshot;

use super::*;
use crate::machine::cargo_config::Origin;

fn config() -> HostConfig {
    HostConfig {
        backend: "/s t/ö/librustc_codegen_cuda.so".into(),
        extra_rustflags: vec!["-C".to_owned(), "link-arg=-L/my libs".to_owned()],
        triple: "x86_64-unknown-linux-gnu".to_owned(),
        env: BTreeMap::from([("CUDA_OXIDE_LLC".to_owned(), "/usr/bin/llc-22".to_owned())]),
    }
}

/// A folder with the host config at its usual place.
struct Case(tempfile::TempDir);

impl Case {
    fn new(text: impl AsRef<[u8]>) -> Self {
        let case = Case(tempfile::tempdir().unwrap());
        fs_err::create_dir(case.0.path().join(".cargo")).unwrap();
        fs_err::write(case.path(), text).unwrap();
        case
    }

    fn path(&self) -> PathBuf {
        self.0.path().join(FILE_NAME)
    }

    fn text(&self) -> String {
        fs_err::read_to_string(self.path()).unwrap()
    }

    fn shown(&self, text: &str) -> String {
        text.replace(&self.0.path().display().to_string(), "[]")
    }

    fn warnings(&self) -> String {
        self.shown(&write(&self.path(), &config()).unwrap().warnings.join("\n"))
    }

    fn error(&self) -> String {
        let error = write(&self.path(), &config()).unwrap_err();
        let status = error.exit().status();
        let hint = error.hint_text().unwrap_or_default();
        self.shown(&format!("{} ({status}): {error}\nhint: {hint}", error.code().id))
    }
}

/// What `text` becomes; a second write must find nothing to do.
fn written(text: &str) -> String {
    let case = Case::new(text);
    write(&case.path(), &config()).unwrap();
    assert_eq!(compare(&case.path(), &config()).unwrap(), []);
    let after = case.text();
    let again = write(&case.path(), &config()).unwrap();
    assert!(!again.changed);
    assert_eq!(case.text(), after);
    after
}

#[test]
fn a_new_file_says_whose_its_keys_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE_NAME);
    let result = write(&path, &config()).unwrap();
    assert_eq!(result, Written { changed: true, warnings: Vec::new() });
    assert_snapshot!(fs_err::read_to_string(&path).unwrap(), @r#"
        # cargo-oxide reads this file. `cargo xtask setup` keeps the keys below a `kiln:` comment up to date;
        # everything else is yours.

        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        [env]
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        "#);
    assert_eq!(written(""), fs_err::read_to_string(&path).unwrap());
}

#[test]
fn b16_the_user_s_keys_comments_and_order_are_kept() {
    assert_snapshot!(written("# mine\n\n# the default\ndefault-arch = 'sm_90' # fast\nbackend = '/old' # old\n\n[env]\n# why\nA = \"b\"\n\n[other]\nx = 1\n"), @r#"
        # mine

        # the default
        default-arch = 'sm_90' # fast
        backend = "/s t/ö/librustc_codegen_cuda.so" # old
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        [env]
        # why
        A = "b"
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"

        [other]
        x = 1
        "#);
    assert_snapshot!(written("# only a comment\n"), @r#"
        # only a comment

        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        [env]
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        "#);
    assert_snapshot!(written("# first\n[env]\nA = 'b'"), @r#"
        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        # first
        [env]
        A = 'b'
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        "#);
    assert_snapshot!(written("# the file's\n\n# the table's\n[env]\nA = 'b'\n"), @r#"
        # the file's

        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]

        # the table's
        [env]
        A = 'b'
        # kiln: set for every build
        CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        "#);
    assert_snapshot!(written("env = { A = 'b' }\n"), @r#"
        env = { A = 'b' , CUDA_OXIDE_LLC = "/usr/bin/llc-22" }
        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]
        "#);
    assert_snapshot!(written("env.A = 'b'\n"), @r#"
        env.A = 'b'
        env.CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        # kiln: the verified backend
        backend = "/s t/ö/librustc_codegen_cuda.so"
        # kiln: the flags that Cargo itself would use for x86_64-unknown-linux-gnu
        extra-rustflags = ["-C", "link-arg=-L/my libs"]
        "#);
}

#[test]
fn b16_line_endings_and_a_byte_order_mark_are_kept() {
    let text = written("\u{feff}# mine\r\ndefault-arch = 'sm_90'\r\n");
    assert!(text.starts_with("\u{feff}# mine\r\ndefault-arch = 'sm_90'\r\n"), "{text:?}");
    assert_eq!(text.matches('\n').count(), text.matches("\r\n").count());
    let text = written("# a\r\n# b\ndefault-arch = 'sm_90'\n");
    assert!(text.starts_with("# a\r\n# b\ndefault-arch = 'sm_90'\n"), "{text:?}");
    assert_eq!(text.matches("\r\n").count(), 1);
}

#[test]
fn b16_unknown_keys_and_ignored_variables_are_reported() {
    let case = Case::new(
        "extra_rustflags = ['-O']\nextra-rustflags = \"-C x\"\ndefault-arch = 90\nmine = 1\n[env]\nRUSTFLAGS = '-O'\n\
             CUDA_OXIDE_NO_FMA = '0'\nA = 1\n",
    );
    assert_snapshot!(case.warnings(), @r#"
        []/.cargo/cuda-oxide.toml: cargo-oxide does not know the key `extra_rustflags`; did you mean `extra-rustflags`?
        []/.cargo/cuda-oxide.toml: `extra-rustflags` was "-C x", which cargo-oxide refuses; it is an array now
        []/.cargo/cuda-oxide.toml: cargo-oxide refuses a `default-arch` that is not a string
        []/.cargo/cuda-oxide.toml: cargo-oxide does not know the key `mine`
        []/.cargo/cuda-oxide.toml: cargo-oxide ignores `RUSTFLAGS` in `[env]`; put flags into Cargo's config
        []/.cargo/cuda-oxide.toml: `CUDA_OXIDE_NO_FMA` in `[env]` changes what cargo-oxide does and is not kiln's
        []/.cargo/cuda-oxide.toml: cargo-oxide refuses `A` in `[env]`, because it is not a string
        "#);
    assert!(case.text().contains("extra_rustflags = ['-O']\n"));
}

#[test]
fn b16_an_invalid_file_is_refused_and_left_alone() {
    for text in ["backend = \n", "env = 3\nx = 1\n", "a = 1\na = 2\n"] {
        let case = Case::new(text);
        let error = case.error();
        assert!(error.starts_with("KILN-0220 (70): []/.cargo/cuda-oxide.toml:"), "{error}");
        assert_eq!(case.text(), text);
    }
    assert_snapshot!(Case::new("backend = \n").error(), @"
        KILN-0220 (70): []/.cargo/cuda-oxide.toml:1:11: string values must be quoted, expected literal string
          |
        1 | backend =
          |           ^
        hint: mend or remove it, then run `cargo xtask setup`; it was left as it is
        ");
    assert_snapshot!(Case::new("x = 1\nenv = 3\n").error(), @"
        KILN-0220 (70): []/.cargo/cuda-oxide.toml:2:7: `env` must be a table of strings
          |
        1 | x = 1
        2 | env = 3
          |       ^
        hint: mend or remove it, then run `cargo xtask setup`; it was left as it is
        ");
    assert_snapshot!(Case::new(b"\xff").error(), @"
        KILN-0220 (70): []/.cargo/cuda-oxide.toml is not UTF-8 text, expected a TOML file
        hint: mend or remove it, then run `cargo xtask setup`
        ");
    let case = Case::new("");
    fs_err::remove_file(case.path()).unwrap();
    fs_err::create_dir(case.path()).unwrap();
    assert_snapshot!(case.error(), @"
        KILN-0220 (70): []/.cargo/cuda-oxide.toml is a folder, expected a TOML file
        hint: mend or remove it, then run `cargo xtask setup`
        ");
}

#[test]
fn b16_a_link_is_written_through() {
    let case = Case::new("");
    let real = case.0.path().join("real.toml");
    fs_err::remove_file(case.path()).unwrap();
    symlink("../real.toml", case.path()).unwrap();
    for _ in 0..2 {
        write(&case.path(), &config()).unwrap();
        assert!(fs_err::symlink_metadata(case.path()).unwrap().is_symlink());
        assert!(fs_err::read_to_string(&real).unwrap().contains("backend = "));
        fs_err::write(&real, "default-arch = 'sm_90'\n").unwrap();
    }
}

#[test]
fn b16_a_read_only_file_is_named_and_left_alone() {
    let case = Case::new("default-arch = 'sm_90'\n");
    fs_err::set_permissions(case.path(), std::fs::Permissions::from_mode(0o444)).unwrap();
    assert_snapshot!(case.error(), @r#"
        KILN-0222 (1): []/.cargo/cuda-oxide.toml is read-only and would have to change:
          backend = "/s t/ö/librustc_codegen_cuda.so"
          extra-rustflags = ["-C", "link-arg=-L/my libs"]
          env.CUDA_OXIDE_LLC = "/usr/bin/llc-22"
        hint: `chmod u+w '[]/.cargo/cuda-oxide.toml'`, then `cargo xtask setup`
        "#);
    assert_eq!(case.text(), "default-arch = 'sm_90'\n");
}

#[test]
fn b16_a_read_only_folder_is_named() {
    let case = Case::new("");
    let folder = case.0.path().join(".cargo");
    fs_err::set_permissions(&folder, std::fs::Permissions::from_mode(0o555)).unwrap();
    // The superuser may write anywhere.
    if fs_err::write(folder.join("probe"), "").is_err() {
        assert!(case.error().starts_with("KILN-0102 (1): cannot write []/.cargo/cuda-oxide.toml"));
    }
    fs_err::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn b16_the_mode_is_kept_and_an_unchanged_file_is_not_written() {
    let case = Case::new("");
    fs_err::set_permissions(case.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(write(&case.path(), &config()).unwrap().changed);
    let first = fs_err::metadata(case.path()).unwrap();
    assert_eq!(first.permissions().mode() & 0o777, 0o640);
    assert!(!write(&case.path(), &config()).unwrap().changed);
    assert_eq!(fs_err::metadata(case.path()).unwrap().ino(), first.ino());
}

#[test]
fn b16_two_writers_at_once_both_succeed() {
    let case = Case::new("# mine\ndefault-arch = 'sm_90'\n");
    let other = HostConfig { backend: "/other.so".into(), extra_rustflags: Vec::new(), ..config() };
    let path = case.path();
    std::thread::scope(|scope| {
        for config in [config(), other.clone(), config(), other.clone()] {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..10 {
                    write(path, &config).unwrap();
                }
            });
        }
    });
    let drifts = [compare(&path, &config()).unwrap(), compare(&path, &other).unwrap()];
    assert!(drifts.contains(&Vec::new()), "{drifts:?}");
    assert!(case.text().starts_with("# mine\ndefault-arch = 'sm_90'\n"));
    assert_eq!(fs_err::read_dir(path.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn a_variable_that_is_no_longer_needed_goes_with_its_comment() {
    let case = Case::new("[env]\nA = 'b'\nCUDA_OXIDE_OPT = '/mine'\n");
    write(&case.path(), &config()).unwrap();
    let config = HostConfig { env: BTreeMap::new(), triple: "aarch64".to_owned(), ..config() };
    assert_eq!(
        compare(&case.path(), &config).unwrap(),
        [Drift {
            key: "env.CUDA_OXIDE_LLC".to_owned(),
            have: Some("\"/usr/bin/llc-22\"".to_owned()),
            want: None
        }]
    );
    write(&case.path(), &config).unwrap();
    assert!(case.text().ends_with("[env]\nA = 'b'\nCUDA_OXIDE_OPT = '/mine'\n"), "{}", case.text());
}

#[test]
fn another_host_renews_the_comment() {
    let case = Case::new("");
    write(&case.path(), &config()).unwrap();
    let config = HostConfig {
        extra_rustflags: Vec::new(),
        triple: "aarch64-unknown-linux-gnu".to_owned(),
        ..config()
    };
    write(&case.path(), &config).unwrap();
    assert!(case.text().contains("would use for aarch64-unknown-linux-gnu\nextra-rustflags = []\n"));
    assert!(!case.text().contains("x86_64"));
}

#[test]
fn g1_folders_with_spaces_and_other_letters() {
    let case = Case::new("");
    let path = case.0.path().join("a b/ü").join(FILE_NAME);
    write(&path, &config()).unwrap();
    assert_eq!(compare(&path, &config()).unwrap(), []);
    assert!(!write(&path, &config()).unwrap().changed);
}

#[test]
fn b17_relative_and_undecodable_paths_are_never_written() {
    use std::os::unix::ffi::OsStringExt as _;
    let case = Case::new("backend = 'target/b.so'\n");
    for backend in ["target/b.so".into(), std::ffi::OsString::from_vec(b"/\xff.so".to_vec())] {
        let error = write(&case.path(), &HostConfig { backend: backend.into(), ..config() }).unwrap_err();
        assert_eq!(error.code().id, HOST_CONFIG_PATH.id);
    }
    assert_eq!(case.text(), "backend = 'target/b.so'\n");
    assert_snapshot!(case.warnings(), @"[]/.cargo/cuda-oxide.toml: `backend` was relative, which cargo-oxide takes from `.cargo/`; it is absolute now");
}

#[test]
fn b5_drift_shows_both_sides() {
    let case =
        Case::new("backend = '/old.so'\nextra-rustflags = [\n  '-C', # one\n  'target-cpu=native',\n]\n");
    let drifts = compare(&case.path(), &config()).unwrap();
    let origin = Origin {
        place: Place::File("/p/.cargo/config.toml".into()),
        key: "build.rustflags".to_owned(),
        flags: config().extra_rustflags,
    };
    let flags = HostFlags { flags: origin.flags.clone(), origin: vec![origin], warnings: Vec::new() };
    let error = drift_error(&case.path(), &drifts, &flags);
    assert_eq!(error.exit().status(), 70);
    let shown = format!("{}: {error}\nhint: {}", error.code().id, error.hint_text().unwrap());
    assert_snapshot!(case.shown(&shown), @r#"
        KILN-0221: []/.cargo/cuda-oxide.toml is not what this machine needs:
          backend: setup writes "/s t/ö/librustc_codegen_cuda.so", cuda-oxide.toml has "/old.so"
          extra-rustflags: config.toml has ["-C", "link-arg=-L/my libs"], cuda-oxide.toml has ["-C", "target-cpu=native"]
          env.CUDA_OXIDE_LLC: setup writes "/usr/bin/llc-22", cuda-oxide.toml has nothing
          caused by: ["-C", "link-arg=-L/my libs"] from /p/.cargo/config.toml `build.rustflags`
        hint: run `cargo xtask setup`
        "#);
}

#[test]
fn b5_equal_values_in_another_spelling_are_no_drift() {
    let text = "extra-rustflags = [\n  '-C', # one\n  \"link-arg=-L/my libs\",\n]\nbackend = \"/s t/\\u00f6/librustc_codegen_cuda.so\"\n\
                    env = { CUDA_OXIDE_LLC = '/usr/bin/llc-22' }\n";
    assert_eq!(compare(&Case::new(text).path(), &config()).unwrap(), []);
}

const TOP: &[&str] = &[
    "# c1",
    "",
    "default-arch = 'x' # c2",
    "# c3\nbackend = 'o' # c4",
    "extra-rustflags = 'text' # c5",
    "x.y = 1",
    "z = { a = 1 } # c6",
    "env.B = 'c' # c7",
    "env = { CUDA_OXIDE_LLC = 'd' } # c8",
    "text = '''\none\ntwo'''",
];

const BELOW: &[&str] = &[
    "",
    "# c9",
    "# c10\n[env] # c11\nA = 'b' # c12",
    "# c13\nCUDA_OXIDE_LLC = 3 # c14",
    "[[list]] # c15\nk = 1",
    "\n# c16\n[t.u]\nv = 1 # c17",
    "# c18",
];

proptest::proptest! {
    // Each case writes and flushes a file.
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    #[test]
    fn nothing_of_the_user_s_is_lost(
        top in proptest::sample::subsequence(TOP, 0..=TOP.len()),
        below in proptest::sample::subsequence(BELOW, 0..=BELOW.len()),
        ending in proptest::sample::select(vec!["\n", "\r\n"]),
    ) {
        let text = [top, below].concat().join("\n").replace('\n', ending);
        let Ok(mut before) = text.parse::<toml::Table>() else { return Ok(()) };
        let after = written(&text);
        let mut parsed: toml::Table = after.parse().unwrap();
        for table in [&mut before, &mut parsed] {
            table.remove(BACKEND);
            table.remove(EXTRA_RUSTFLAGS);
            if let Some(toml::Value::Table(env)) = table.get_mut(ENV) {
                env.remove("CUDA_OXIDE_LLC");
            }
        }
        before.entry(ENV).or_insert_with(|| toml::Table::new().into());
        proptest::prop_assert_eq!(&parsed, &before);
        let comments = |text: &str| {
            let found = text.lines().filter_map(|line| line.split_once("# c"));
            found.map(|(_, comment)| comment.trim_end().to_owned()).collect::<Vec<_>>()
        };
        let kept = comments(&after);
        for comment in comments(&text) {
            proptest::prop_assert!(kept.contains(&comment), "{comment} in {after}");
        }
    }

    #[test]
    fn other_lines_keep_their_endings(lines in proptest::collection::vec("(# [a-z]{0,3})?(\r)?", 0..8)) {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let split = Lines::split(&text);
        proptest::prop_assert_eq!(split.join(&split.lf()), text);
    }
}
