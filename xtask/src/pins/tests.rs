use insta::assert_snapshot;

use super::*;

const VALID: &str = r#"[source]
repository = "https://github.com/NVIDIA/cuda-rust"
revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
tree = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
backend = "crates/rustc-codegen-cuda"
cargo-oxide = "crates/cargo-oxide"
lock = "Cargo.lock"
lock-sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

[[patch]]
file = "0001-one.patch"
sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
reason = "an example"

[toolchain]
channel = "1.95.0"
commit-hash = "59807616e1fa2540724bfbac14d7976d7e4a3860"
components = ["rustc-dev"]

[llvm]
preferred = 22
verified = [22]

[kernels]
contraction = false

[kernels.ptx.sm_90.llvm-22]
kiln_rms_norm = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"#;

fn parse(text: &str) -> Result<Pin> {
    Pin::parse(Path::new("PROVENANCE"), text)
}

/// What `VALID` says once `from` is `to`.
fn error_with(from: &str, to: &str) -> String {
    assert_eq!(VALID.matches(from).count(), 1, "{from}");
    let error = parse(&VALID.replace(from, to)).unwrap_err();
    assert_eq!(error.code().id, PIN_INVALID.id);
    error.to_string()
}

#[test]
fn every_key_is_read() {
    let pin = parse(VALID).unwrap();
    assert_eq!(pin.source.repository.as_str(), "https://github.com/NVIDIA/cuda-rust");
    assert_eq!(pin.source.workspace(Path::new("/t")), Path::new("/t"));
    assert_eq!(pin.source.backend.under(Path::new("/t")), Path::new("/t/crates/rustc-codegen-cuda"));
    assert_eq!(pin.patches[0].file.as_str(), "0001-one.patch");
    assert_eq!(pin.toolchain.channel.as_str(), "1.95.0");
    assert_eq!(pin.toolchain.optional_components, Vec::<String>::new());
    assert_eq!(pin.llvm, Llvm { preferred: LlvmMajor(22), verified: vec![LlvmMajor(22)] });
    let (arch, tables) = pin.kernels.ptx.first_key_value().unwrap();
    assert_eq!(arch.as_str(), "sm_90");
    assert_eq!(tables[&PtxCompiler::Llc(LlvmMajor(22))]["kiln_rms_norm"], Sha256::of(b""));
}

#[test]
fn a_byte_order_mark_and_crlf_change_nothing() {
    let text = format!("\u{feff}{}", VALID.replace('\n', "\r\n"));
    assert_eq!(parse(&text).unwrap(), parse(VALID).unwrap());
}

#[test]
fn the_repository_s_own_file_is_valid() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let pin = Pin::load(root).unwrap();
    assert_eq!(pin.llvm.preferred, LlvmMajor(22));
    assert!(!pin.kernels.contraction);
}

#[test]
fn unknown_and_misspelt_keys() {
    assert_snapshot!(error_with("cargo-oxide =", "cargo_oxide ="), @r#"
        PROVENANCE:6:1: unknown field `cargo_oxide`, expected one of `repository`, `revision`, `tree`, `archive-sha256`, `subfolder`, `backend`, `cargo-oxide`, `lock`, `lock-sha256`, `git-crates`
          |
        5 | backend = "crates/rustc-codegen-cuda"
        6 | cargo_oxide = "crates/cargo-oxide"
          | ^^^^^^^^^^^
        7 | lock = "Cargo.lock"
        "#);
    assert_snapshot!(error_with("[llvm]", "[lllvm]"), @"
        PROVENANCE:20:2: unknown field `lllvm`, expected one of `source`, `patch`, `toolchain`, `llvm`, `libnvvm`, `kernels`, `output`, `model`, `cuda`
           |
        19 |
        20 | [lllvm]
           |  ^^^^^
        21 | preferred = 22
        ");
    assert_snapshot!(error_with("reason = \"an example\"", "reason = \"an example\"\nwhy = 1"), @r#"
        PROVENANCE:14:1: unknown field `why`, expected one of `file`, `sha256`, `reason`, `upstream`
           |
        13 | reason = "an example"
        14 | why = 1
           | ^^^
        15 |
        "#);
}

#[test]
fn missing_keys_and_tables() {
    assert_snapshot!(error_with("channel = \"1.95.0\"\n", ""), @r#"
        PROVENANCE:15:1: missing field `channel`
           |
        14 |
        15 | [toolchain]
           | ^^^^^^^^^^^
        16 | commit-hash = "59807616e1fa2540724bfbac14d7976d7e4a3860"
        "#);
    assert_snapshot!(parse("").unwrap_err().to_string(), @"
        PROVENANCE:1:1: missing field `source`
          |
        1 |
          | ^
        ");
}

#[test]
fn wrong_types() {
    assert_snapshot!(error_with("preferred = 22", "preferred = \"22\""), @r#"
        PROVENANCE:21:13: invalid type: string "22", expected an LLVM major version such as 22
           |
        20 | [llvm]
        21 | preferred = "22"
           |             ^^^^
        22 | verified = [22]
        "#);
    assert_snapshot!(error_with("contraction = false", "contraction = 0"), @"
        PROVENANCE:25:15: invalid type: integer `0`, expected a boolean
           |
        24 | [kernels]
        25 | contraction = 0
           |               ^
        26 |
        ");
    assert_snapshot!(error_with("[\"rustc-dev\"]", "\"rustc-dev\""), @r#"
        PROVENANCE:18:14: invalid type: string "rustc-dev", expected a sequence
           |
        17 | commit-hash = "59807616e1fa2540724bfbac14d7976d7e4a3860"
        18 | components = "rustc-dev"
           |              ^^^^^^^^^^^
        19 |
        "#);
}

#[test]
fn an_array_is_no_table() {
    let text = VALID.replace("[llvm]\npreferred = 22\nverified = [22]\n", "");
    assert_snapshot!(parse(&format!("llvm = [22, [22]]\n{text}")).unwrap_err().to_string(), @"
        PROVENANCE:1:8: invalid type: sequence, expected a table
          |
        1 | llvm = [22, [22]]
          |        ^^^^^^^^^^
        2 | [source]
        ");
}

#[test]
fn duplicate_keys_and_broken_syntax() {
    assert_snapshot!(error_with("preferred = 22", "preferred = 22\npreferred = 22"), @"
        PROVENANCE:22:1: duplicate key
           |
        21 | preferred = 22
        22 | preferred = 22
           | ^^^^^^^^^
        23 | verified = [22]
        ");
    assert_snapshot!(error_with("[llvm]", "[kernels]\n[llvm]"), @"
        PROVENANCE:25:2: duplicate key
           |
        24 |
        25 | [kernels]
           |  ^^^^^^^
        26 | contraction = false
        ");
    assert_snapshot!(error_with("verified = [22]", "verified = [22"), @"
        PROVENANCE:24:1: missing comma between array elements, expected `,`
           |
        23 |
        24 | [kernels]
           | ^
        25 | contraction = false
        ");
}

#[test]
fn hashes_that_are_none() {
    assert_snapshot!(error_with("29396b7f643b1d42eb4d80b7347ad27bb011525a", "29396b7"), @r#"
        PROVENANCE:3:12: expected a full git object name of 40 lower-case hexadecimal digits, found 7 characters
          |
        2 | repository = "https://github.com/NVIDIA/cuda-rust"
        3 | revision = "29396b7"
          |            ^^^^^^^^^
        4 | tree = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
        "#);
    assert_snapshot!(error_with("sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=", "sha256-AAAA"), @r#"
        PROVENANCE:4:8: expected an SRI hash, `sha256-` and 44 base64 characters, found "sha256-AAAA"
          |
        3 | revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
        4 | tree = "sha256-AAAA"
          |        ^^^^^^^^^^^^^
        5 | backend = "crates/rustc-codegen-cuda"
        "#);
    assert_snapshot!(error_with("lock-sha256 = \"e3", "lock-sha256 = \"E3"), @r#"
        PROVENANCE:8:15: expected a sha256 of 64 lower-case hexadecimal digits, found 'E' in it
          |
        7 | lock = "Cargo.lock"
        8 | lock-sha256 = "E3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
          |               ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        9 |
        "#);
    assert_snapshot!(error_with("kiln_rms_norm = \"e3", "kiln_rms_norm = \"3"), @r#"
        PROVENANCE:28:17: expected a sha256 of 64 lower-case hexadecimal digits, found 63 characters
           |
        27 | [kernels.ptx.sm_90.llvm-22]
        28 | kiln_rms_norm = "3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
           |                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        "#);
}

#[test]
fn paths_that_leave_the_tree() {
    assert_snapshot!(error_with("\"crates/cargo-oxide\"", "\"crates/../../cargo-oxide\""), @r#"
        PROVENANCE:6:15: expected a relative path inside the source tree, such as `crates/cargo-oxide`; "crates/../../cargo-oxide" leaves the tree
          |
        5 | backend = "crates/rustc-codegen-cuda"
        6 | cargo-oxide = "crates/../../cargo-oxide"
          |               ^^^^^^^^^^^^^^^^^^^^^^^^^^
        7 | lock = "Cargo.lock"
        "#);
    assert_snapshot!(error_with("\"crates/cargo-oxide\"", "\"/crates/cargo-oxide\""), @r#"
        PROVENANCE:6:15: expected a relative path inside the source tree, such as `crates/cargo-oxide`; "/crates/cargo-oxide" is absolute
          |
        5 | backend = "crates/rustc-codegen-cuda"
        6 | cargo-oxide = "/crates/cargo-oxide"
          |               ^^^^^^^^^^^^^^^^^^^^^
        7 | lock = "Cargo.lock"
        "#);
    assert_snapshot!(error_with("\"Cargo.lock\"", "'C:\\Cargo.lock'"), @r#"
        PROVENANCE:7:8: expected a relative path inside the source tree, such as `crates/cargo-oxide`; found a character in "C:\\Cargo.lock" that is not portable
          |
        6 | cargo-oxide = "crates/cargo-oxide"
        7 | lock = 'C:\Cargo.lock'
          |        ^^^^^^^^^^^^^^^
        8 | lock-sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
    assert_snapshot!(error_with("\"Cargo.lock\"", "\"./Cargo.lock\""), @r#"
        PROVENANCE:7:8: expected a relative path inside the source tree, such as `crates/cargo-oxide`; found an empty part or a `.` in "./Cargo.lock"
          |
        6 | cargo-oxide = "crates/cargo-oxide"
        7 | lock = "./Cargo.lock"
          |        ^^^^^^^^^^^^^^
        8 | lock-sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
    assert_snapshot!(error_with("\"0001-one.patch\"", "\"../0001-one.patch\""), @r#"
        PROVENANCE:11:8: expected a file name in backend-patches/ that ends in `.patch`, found "../0001-one.patch"
           |
        10 | [[patch]]
        11 | file = "../0001-one.patch"
           |        ^^^^^^^^^^^^^^^^^^^
        12 | sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
}

#[test]
fn addresses_that_are_not_allowed() {
    let repository = "https://github.com/NVIDIA/cuda-rust";
    assert_snapshot!(error_with(repository, "http://github.com/NVIDIA/cuda-rust"), @r#"
        PROVENANCE:2:14: expected an https:// address of a repository, found "http://github.com/NVIDIA/cuda-rust"
          |
        1 | [source]
        2 | repository = "http://github.com/NVIDIA/cuda-rust"
          |              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        3 | revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
        "#);
    assert_snapshot!(error_with(repository, "https://user:secret@github.com/NVIDIA/cuda-rust"), @r#"
        PROVENANCE:2:14: expected a plain repository address, without user, query, quotes or spaces
          |
        1 | [source]
        2 | repository = "https://user:secret@github.com/NVIDIA/cuda-rust"
          |              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        3 | revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
        "#);
    assert_snapshot!(error_with(repository, "https://github.com/NVIDIA/cuda-rust/"), @r#"
        PROVENANCE:2:14: expected a repository's address without a trailing or double slash, found "https://github.com/NVIDIA/cuda-rust/"
          |
        1 | [source]
        2 | repository = "https://github.com/NVIDIA/cuda-rust/"
          |              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
        3 | revision = "29396b7f643b1d42eb4d80b7347ad27bb011525a"
        "#);
    for local in ["http://127.0.0.1:8080/a/b", "http://localhost/a"] {
        assert!(parse(&VALID.replace(repository, local)).is_ok(), "{local}");
    }
    assert!(parse(&VALID.replace(repository, "http://127.0.0.1.example.org/a")).is_err());
}

#[test]
fn moving_releases_are_no_pin() {
    assert_snapshot!(error_with("1.95.0", "stable"), @r#"
        PROVENANCE:16:11: expected an exact Rust release such as `1.95.0` or `nightly-2026-04-03`, found "stable"
           |
        15 | [toolchain]
        16 | channel = "stable"
           |           ^^^^^^^^
        17 | commit-hash = "59807616e1fa2540724bfbac14d7976d7e4a3860"
        "#);
    for moving in ["1.95", "nightly", "beta", "1.95.0-beta.1", "nightly-2026-4-3", ""] {
        assert!(moving.parse::<Channel>().is_err(), "{moving}");
    }
    assert!("nightly-2026-04-03".parse::<Channel>().is_ok());
}

#[test]
fn llvm_majors_that_do_not_fit() {
    assert_snapshot!(error_with("preferred = 22", "preferred = 23"), @"
        PROVENANCE:21:13: the preferred LLVM 23 is not among the verified ones (22)
           |
        20 | [llvm]
        21 | preferred = 23
           |             ^^
        22 | verified = [22]
        ");
    assert_snapshot!(error_with("verified = [22]", "verified = []"), @"
        PROVENANCE:22:12: no LLVM major is verified, expected at least the preferred one
           |
        21 | preferred = 22
        22 | verified = []
           |            ^^
        23 |
        ");
    assert_snapshot!(error_with("verified = [22]", "verified = [22, 23, 22]"), @"
        PROVENANCE:22:21: LLVM 22 is listed twice
           |
        21 | preferred = 22
        22 | verified = [22, 23, 22]
           |                     ^^
        23 |
        ");
    assert_eq!(
        parse(&VALID.replace("[kernels]", "[libnvvm]\nverified = [\"13.0\", \"12.9\"]\n\n[kernels]"))
            .unwrap()
            .libnvvm,
        [CudaVersion { major: 13, minor: 0 }, CudaVersion { major: 12, minor: 9 }]
    );
    assert!(parse(VALID).unwrap().libnvvm.is_empty());
    for (list, what) in [
        ("\"13\"", "expected a CUDA release such as `13.0`, found \"13\""),
        ("\"13.00\"", "expected a CUDA release such as `13.0`, found \"13.00\""),
        ("\"13.0\", \"13.0\"", "CUDA 13.0 is listed twice"),
        ("13.0", "invalid type: floating point `13.0`, expected a string"),
    ] {
        let libnvvm = format!("verified = [22]\n[libnvvm]\nverified = [{list}]");
        let error = error_with("verified = [22]", &libnvvm);
        assert!(error.contains(what), "{error}");
    }
    for table in ["libnvvm-13", "libnvvm-013.0", "libnvvm-", "libnvvm-13.0.1"] {
        let error = error_with("sm_90.llvm-22", &format!("sm_90.\"{table}\""));
        assert!(error.contains("or `libnvvm-<CUDA release>` such as"), "{error}");
    }
    assert_snapshot!(error_with("verified = [22]", "verified = [22, -1]"), @"
        PROVENANCE:22:17: invalid value: integer `-1`, expected an LLVM major version such as 22
           |
        21 | preferred = 22
        22 | verified = [22, -1]
           |                 ^^
        23 |
        ");
}

#[test]
fn kernel_tables_with_wrong_names() {
    assert_snapshot!(error_with("sm_90.llvm-22", "SM_90.llvm-22"), @r#"
        PROVENANCE:27:14: expected an architecture such as `sm_90` or `sm_120a`, found "SM_90"
           |
        26 |
        27 | [kernels.ptx.SM_90.llvm-22]
           |              ^^^^^
        28 | kiln_rms_norm = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
    assert_snapshot!(error_with("sm_90.llvm-22", "sm_90.22"), @r#"
        PROVENANCE:27:20: expected a table `llvm-<major>` such as `llvm-22`, or `libnvvm-<CUDA release>` such as `libnvvm-13.0`, found "22"
           |
        26 |
        27 | [kernels.ptx.sm_90.22]
           |                    ^^
        28 | kiln_rms_norm = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        "#);
}

#[test]
fn a_patch_listed_twice_or_without_a_reason() {
    let again = "[[patch]]\nfile = \"0001-one.patch\"\nreason = \"again\"\nsha256 = \
                     \"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\"\n\n[toolchain]";
    assert_snapshot!(error_with("[toolchain]", again), @r#"
        PROVENANCE:16:8: the patch 0001-one.patch is listed twice
           |
        15 | [[patch]]
        16 | file = "0001-one.patch"
           |        ^^^^^^^^^^^^^^^^
        17 | reason = "again"
        "#);
    assert_snapshot!(error_with("\"an example\"", "\" \""), @r#"
        PROVENANCE:13:10: a patch needs a reason
           |
        12 | sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        13 | reason = " "
           |          ^^^
        14 |
        "#);
}

#[test]
fn a_missing_file_and_one_that_is_not_utf8() {
    let root = tempfile::tempdir().unwrap();
    let error = |root: &Path| {
        let error = Pin::load(root).unwrap_err();
        let shown = format!("{}: {error}\nhint: {}", error.code().id, error.hint_text().unwrap());
        shown.replace(&root.display().to_string(), "[root]")
    };
    assert_snapshot!(error(root.path()), @"
        KILN-0201: there is no [root]/PROVENANCE
        hint: restore it with `git checkout -- PROVENANCE`
        ");
    fs_err::write(root.path().join(FILE_NAME), b"a = \"\xe9\"").unwrap();
    assert_snapshot!(error(root.path()), @"
        KILN-0202: [root]/PROVENANCE is not UTF-8 text: wrong byte at offset 5
        hint: restore it with `git checkout -- PROVENANCE`, or save it as UTF-8
        ");
}

const PATCH: &[u8] = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n";

/// A pin with one patch of content `PATCH`, and the folder with `content` under its name.
fn patch_case(content: Option<&[u8]>) -> (Pin, tempfile::TempDir) {
    let mut pin = parse(VALID).unwrap();
    pin.patches[0].sha256 = Sha256::of(PATCH);
    let folder = tempfile::tempdir().unwrap();
    if let Some(content) = content {
        fs_err::write(folder.path().join("0001-one.patch"), content).unwrap();
    }
    (pin, folder)
}

fn patch_error(pin: &Pin, folder: &Path) -> String {
    let error = pin.check_patches(folder).unwrap_err();
    let shown = format!(
        "{} ({}): {error}\nhint: {}",
        error.code().id,
        error.exit().status(),
        error.hint_text().unwrap()
    );
    shown.replace(&folder.display().to_string(), "[patches]")
}

#[test]
fn recorded_patches_are_given_with_their_bytes() {
    let (pin, folder) = patch_case(Some(PATCH));
    let patches = pin.check_patches(folder.path()).unwrap();
    assert_eq!(patches.len(), 1);
    assert_eq!((patches[0].bytes.as_slice(), patches[0].sha256), (PATCH, Sha256::of(PATCH)));
    assert_eq!(patches[0].reason, "an example");
}

#[test]
fn d2_a_patch_with_converted_line_endings_is_named_as_such() {
    let (pin, folder) = patch_case(Some(&with_crlf(PATCH)));
    assert_snapshot!(patch_error(&pin, folder.path()), @"
        KILN-0205 (70): the patch [patches]/0001-one.patch changed on checkout (autocrlf?): only its line endings differ
          recorded: sha256 896ed76f28b6c93357acbc945860fa41226a9d8c34b312fdf5f9574fa06d7f7b
          found:    sha256 8a654ca1b3d741c4e6e7d9f760b76268b61c114331cf8f56bd44ce3071f85ff5
        hint: restore it with `rm [patches]/0001-one.patch` and `git checkout -- [patches]/0001-one.patch`, or, if the change is meant, record it with `cargo xtask pin --patches --write`
        ");
}

#[test]
fn d2_the_other_direction_is_named_too() {
    let (mut pin, folder) = patch_case(Some(PATCH));
    pin.patches[0].sha256 = Sha256::of(&with_crlf(PATCH));
    assert!(patch_error(&pin, folder.path()).contains("changed on checkout (autocrlf?)"));
}

#[test]
fn d9_an_altered_patch_is_named_with_both_hashes() {
    let (pin, folder) = patch_case(Some(b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n-- \n2.47.0\n"));
    assert_snapshot!(patch_error(&pin, folder.path()), @"
        KILN-0205 (70): the patch [patches]/0001-one.patch is not the recorded one
          recorded: sha256 896ed76f28b6c93357acbc945860fa41226a9d8c34b312fdf5f9574fa06d7f7b
          found:    sha256 a3f60748ac09f8b48cb70ca129a25b06a5d3b9394237d02ba278f5fe310d20dd
        hint: restore it with `rm [patches]/0001-one.patch` and `git checkout -- [patches]/0001-one.patch`, or, if the change is meant, record it with `cargo xtask pin --patches --write`
        ");
}

#[test]
fn a_patch_that_is_not_there_or_not_listed() {
    let (pin, folder) = patch_case(None);
    assert_snapshot!(patch_error(&pin, folder.path()), @"
        KILN-0204 (1): the patch [patches]/0001-one.patch is listed in PROVENANCE and is not there
        hint: restore it with `git checkout -- [patches]/0001-one.patch`
        ");
    let (pin, folder) = patch_case(Some(PATCH));
    fs_err::write(folder.path().join("0002-two.PATCH"), "").unwrap();
    fs_err::write(folder.path().join("README.md"), "").unwrap();
    assert_snapshot!(patch_error(&pin, folder.path()), @"
        KILN-0206 (70): not listed in PROVENANCE: [patches]/0002-two.PATCH
        hint: record it with `cargo xtask pin --patches --write`, or remove it
        ");
}

#[test]
fn line_ending_conversions_are_each_other_s_inverse() {
    assert_eq!(with_lf(b"a\r\nb\rc\r\r\n\r"), b"a\nb\rc\r\n\r");
    assert_eq!(with_crlf(b"a\n\nb"), b"a\r\n\r\nb");
    assert_eq!(with_lf(&with_crlf(PATCH)), PATCH);
}

#[test]
fn tree_paths() {
    for good in ["a", "crates/x", "a b/ü", "..a/b.."] {
        assert!(good.parse::<TreePath>().is_ok(), "{good}");
    }
    for bad in ["", "/", "a/", "a//b", ".", "a/./b", "..", "a/..", "a\\b", "c:/x", "a\nb"] {
        assert!(bad.parse::<TreePath>().is_err(), "{bad}");
    }
}

#[test]
fn models_are_read_strictly() {
    let model = r#"
[[model]]
name = "tiny-1"
package = "llm-tiny"
version = "0.1.2"
file = "Tiny.Q4_1.gguf"
sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
licence = "Apache-2.0"
"#;
    let pin = parse(&format!("{VALID}{model}")).unwrap();
    assert_eq!((pin.models[0].name.as_str(), pin.models[0].file.as_str()), ("tiny-1", "Tiny.Q4_1.gguf"));
    for (from, to) in [
        ("tiny-1", "Tiny 1"),
        ("\"llm-tiny\"", "\"--index-url=x\""),
        ("\"llm-tiny\"", "\"a @ http://b\""),
        ("\"0.1.2\"", "\">=0.1\""),
        ("Tiny.Q4_1.gguf", "../Tiny.gguf"),
        ("licence", "license"),
    ] {
        assert!(model.contains(from), "{from}");
        assert!(parse(&format!("{VALID}{}", model.replace(from, to))).is_err(), "{to}");
    }
    let error = parse(&format!("{VALID}{model}{model}")).unwrap_err().to_string();
    assert!(
        error.starts_with("PROVENANCE:") && error.contains("the model tiny-1 is listed twice"),
        "{error}"
    );
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC*", at in 0..VALID.len()) {
        let _ = parse(&text);
        let _ = parse(&format!("{}{text}{}", &VALID[..at], &VALID[at..]));
    }
}
