use std::os::unix::fs::{PermissionsExt as _, symlink};

use proptest::prelude::*;

use super::*;
use crate::base::hash::Sha256;
use crate::report::error::{Code, Error};

/// A source tree with `crates/f.txt`, which the fixtures change.
struct Source(tempfile::TempDir);

impl Source {
    fn new() -> Self {
        let source = Source(tempfile::tempdir().unwrap());
        source.write("crates/f.txt", "one\ntwo\nthree\n");
        source
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, path: &str, contents: impl AsRef<[u8]>) {
        let path = self.root().join(path);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, contents).unwrap();
    }

    fn read(&self, path: &str) -> String {
        fs_err::read_to_string(self.root().join(path)).unwrap()
    }

    fn has(&self, path: &str) -> bool {
        self.root().join(path).symlink_metadata().is_ok()
    }

    fn is_executable(&self, path: &str) -> bool {
        fs_err::metadata(self.root().join(path)).unwrap().permissions().mode() & 0o111 == 0o111
    }

    /// Every path and its content, to see that nothing changed.
    fn snapshot(&self) -> Vec<(PathBuf, Vec<u8>)> {
        fn walk(folder: &Path, found: &mut Vec<(PathBuf, Vec<u8>)>) {
            for entry in fs_err::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let is_folder = path.is_dir();
                found.push((path.clone(), if is_folder { Vec::new() } else { fs_err::read(&path).unwrap() }));
                if is_folder {
                    walk(&path, found);
                }
            }
        }
        let mut found = Vec::new();
        walk(self.root(), &mut found);
        found.sort();
        found
    }

    /// The error of applying `patch`, which must leave everything as it was.
    #[track_caller]
    fn refused(&self, patch: &Patch, code: &Code) -> String {
        let before = self.snapshot();
        let error = patch.apply(self.root()).unwrap_err();
        assert_eq!(self.snapshot(), before);
        checked(&error, code)
    }
}

#[track_caller]
fn checked(error: &Error, code: &Code) -> String {
    assert_eq!(error.code().id, code.id, "{error}");
    assert!(error.hint_text().is_some());
    error.to_string()
}

fn fixture_bytes(name: &str) -> Vec<u8> {
    let patches = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/patches");
    fs_err::read(patches.join(name)).unwrap()
}

fn fixture(name: &str) -> Patch {
    Patch::parse(name, &fixture_bytes(name)).unwrap()
}

fn parse(text: &str) -> Patch {
    Patch::parse("p.patch", text.as_bytes()).unwrap()
}

#[track_caller]
fn malformed(text: impl AsRef<[u8]>, code: &Code) -> String {
    checked(&Patch::parse("p.patch", text.as_ref()).unwrap_err(), code)
}

/// A diff of `crates/f.txt` made of these hunks.
fn diff(hunks: &str) -> String {
    format!("diff --git a/crates/f.txt b/crates/f.txt\n--- a/crates/f.txt\n+++ b/crates/f.txt\n{hunks}")
}

const CHANGE: &str = "@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n";

#[test]
fn a_change_is_applied_and_recorded() {
    for name in ["gitstyle.patch", "plainudiff.patch"] {
        let source = Source::new();
        let applied = fixture(name).apply(source.root()).unwrap();
        assert_eq!(source.read("crates/f.txt"), "one\nTWO\nthree\n");
        assert_eq!(
            applied.files,
            [AppliedFile {
                path: "crates/f.txt".into(),
                before: Some(Sha256::of(b"one\ntwo\nthree\n")),
                after: Some(Sha256::of(b"one\nTWO\nthree\n")),
                executable: false,
            }]
        );
        assert_eq!(fixture(name).paths().collect::<Vec<_>>(), [Path::new("crates/f.txt")]);
    }
}

#[test]
fn several_hunks_and_their_line_numbers_fit_together() {
    let source = Source::new();
    source.write("crates/f.txt", "1\n2\n3\n4\n5\n6\n7\n8\n9\n");
    let text = diff(
        "@@ -1,2 +1,4 @@ fn x() {\n 1\n+a\n+b\n 2\n@@ -5,3 +7,2 @@\n 5\n-6\n 7\n@@ -9 +10 @@\n-9\n+nine\n",
    );
    parse(&text).apply(source.root()).unwrap();
    assert_eq!(source.read("crates/f.txt"), "1\na\nb\n2\n3\n4\n5\n7\n8\nnine\n");
}

#[test]
fn d1_an_outer_repository_changes_nothing_about_the_outcome() {
    let source = Source::new();
    // What makes `git apply` skip every file and succeed.
    source.write(".git/HEAD", "ref: refs/heads/main\n");
    source.write(".git/config", "[core]\n\tbare = false\n");
    let inner = source.root().join("target/store");
    fs_err::create_dir_all(inner.join("crates")).unwrap();
    fs_err::write(inner.join("crates/f.txt"), "one\ntwo\nthree\n").unwrap();
    let applied = fixture("gitstyle.patch").apply(&inner).unwrap();
    let now = fs_err::read(inner.join("crates/f.txt")).unwrap();
    assert_eq!(now, b"one\nTWO\nthree\n");
    assert_eq!(applied.files[0].after, Some(Sha256::of(&now)));
}

#[test]
fn d2_a_patch_with_crlf_line_ends_is_refused() {
    for (name, line) in
        [("crlf.patch", "a/crates/f.txt b/crates/f.txt"), ("newcrlf.patch", "a/crates/n.txt b/crates/n.txt")]
    {
        let error = Patch::parse(name, &fixture_bytes(name)).unwrap_err();
        assert_eq!(
            checked(&error, &CRLF),
            format!("{name}:1: `diff --git {line}\\r` ends in a carriage return")
        );
        assert_eq!(
            error.hint_text(),
            Some("put `*.patch -text` into .gitattributes, then remove the patch and check it out again")
        );
    }
    let late = diff(CHANGE).replace(" @@\n", " @@\r\n");
    assert_eq!(malformed(late, &CRLF), "p.patch:4: `@@ -1,3 +1,3 @@\\r` ends in a carriage return");
}

#[test]
fn d3_a_target_with_crlf_is_an_exact_match_or_refused() {
    let source = Source::new();
    source.write("crates/f.txt", "one\r\ntwo\r\nthree\r\n");
    assert_eq!(
        source.refused(&fixture("gitstyle.patch"), &MISMATCH),
        "gitstyle.patch does not apply to crates/f.txt at `@@ -1,3 +1,3 @@`\n  \
         line 1 expected `one`\n  line 1 found    `one\\r`\n  \
         line 2 expected `two`\n  line 2 found    `two\\r`\n  \
         line 3 expected `three`\n  line 3 found    `three\\r`\n  \
         the line ends differ: one side has CRLF"
    );
    let exact = diff("@@ -1,3 +1,3 @@\n one\r\n-two\r\n+TWO\r\n three\r\n");
    parse(&exact).apply(source.root()).unwrap();
    assert_eq!(source.read("crates/f.txt"), "one\r\nTWO\r\nthree\r\n");
}

#[test]
fn d4_an_applied_or_reversed_patch_is_an_error_that_says_so() {
    let source = Source::new();
    fixture("gitstyle.patch").apply(source.root()).unwrap();
    let expected = "gitstyle.patch: crates/f.txt already has what the patch would make of it: \
                    it is already applied, or reversed";
    assert_eq!(source.refused(&fixture("gitstyle.patch"), &ALREADY_APPLIED), expected);

    let source = Source::new();
    let reversed = diff("@@ -1,3 +1,3 @@\n one\n-TWO\n+two\n three\n");
    assert!(source.refused(&parse(&reversed), &ALREADY_APPLIED).ends_with("already applied, or reversed"));

    let source = Source::new();
    fixture("ren.patch").apply(source.root()).unwrap();
    assert_eq!(
        source.refused(&fixture("ren.patch"), &ALREADY_APPLIED),
        "ren.patch: crates/f.txt is already renamed to crates/g2.txt"
    );
}

#[test]
fn d5_one_changed_context_line_refuses_the_patch() {
    let source = Source::new();
    source.write("crates/f.txt", "One\ntwo\nthree\n");
    assert_eq!(
        source.refused(&fixture("gitstyle.patch"), &MISMATCH),
        "gitstyle.patch does not apply to crates/f.txt at `@@ -1,3 +1,3 @@`\n  \
         line 1 expected `one`\n  line 1 found    `One`\n  \
         line 2 expected `two`\n  line 2 found    `two`\n  \
         line 3 expected `three`\n  line 3 found    `three`"
    );
    source.write("crates/f.txt", "one\n");
    assert_eq!(
        source.refused(&fixture("gitstyle.patch"), &MISMATCH),
        "gitstyle.patch does not apply to crates/f.txt at `@@ -1,3 +1,3 @@`\n  \
         line 2 expected `two`\n  line 2 found    the end of the file\n  \
         line 3 expected `three`\n  line 3 found    the end of the file"
    );
}

#[test]
fn d6_an_offset_is_reported_and_refused() {
    let source = Source::new();
    source.write("crates/f.txt", "new\n".repeat(30) + "one\ntwo\nthree\n");
    assert_eq!(
        source.refused(&fixture("gitstyle.patch"), &OFFSET),
        "gitstyle.patch does not apply to crates/f.txt at `@@ -1,3 +1,3 @@`\n  \
         it would apply at line 31, offset +30"
    );
    let below = diff("@@ -3,3 +3,3 @@\n one\n-two\n+TWO\n three\n");
    let source = Source::new();
    assert!(source.refused(&parse(&below), &OFFSET).ends_with("it would apply at line 1, offset -2"));
}

#[test]
fn d7_a_series_is_applied_as_a_whole_or_not_at_all() {
    let source = Source::new();
    source.write("crates/g.txt", "x\n");
    assert_eq!(
        source.refused(&fixture("two.patch"), &MISMATCH),
        "two.patch does not apply to crates/g.txt at `@@ -1 +1 @@`\n  \
         line 1 expected `nomatch`\n  line 1 found    `x`"
    );

    let third =
        Patch::parse("3.patch", diff("@@ -1,3 +1,3 @@\n one\n-TWO\n+2\n three\n").as_bytes()).unwrap();
    let before = source.snapshot();
    let series = [fixture("newfile.patch"), fixture("two.patch"), third.clone()];
    checked(&apply_series(&series, source.root()).unwrap_err(), &MISMATCH);
    assert_eq!(source.snapshot(), before);

    // The second is mended, and the third builds on it.
    let second = Patch::parse("2.patch", diff(CHANGE).as_bytes()).unwrap();
    let applied = apply_series(&[fixture("newfile.patch"), second, third], source.root()).unwrap();
    assert_eq!(source.read("crates/f.txt"), "one\n2\nthree\n");
    assert_eq!(applied.len(), 3);
    assert_eq!(applied[1].files[0].after, applied[2].files[0].before);
    assert_eq!(applied[2].files[0].after, Some(Sha256::of(b"one\n2\nthree\n")));
}

#[test]
fn d8_a_rename_moves_the_file_and_a_mode_change_sets_the_bit() {
    let source = Source::new();
    let applied = fixture("ren.patch").apply(source.root()).unwrap();
    assert_eq!(source.read("crates/g2.txt"), "one\ntwo\nthree\n");
    assert!(!source.has("crates/f.txt"));
    let hash = Some(Sha256::of(b"one\ntwo\nthree\n"));
    let entries: Vec<_> = applied.files.iter().map(|file| (file.before, file.after)).collect();
    assert_eq!(entries, [(None, hash), (hash, None)]);

    let source = Source::new();
    fixture("mode.patch").apply(source.root()).unwrap();
    assert!(source.is_executable("crates/f.txt"));
    assert_eq!(
        source.refused(&fixture("mode.patch"), &MODE),
        "mode.patch: crates/f.txt is executable, expected not executable"
    );
    parse("diff --git a/crates/f.txt b/crates/f.txt\nold mode 100755\nnew mode 100644\n")
        .apply(source.root())
        .unwrap();
    assert!(!source.is_executable("crates/f.txt"));
}

#[test]
fn d8_a_rename_with_changes_is_applied_fully() {
    let source = Source::new();
    let text = "diff --git a/crates/f.txt b/other/g.txt\nold mode 100644\nnew mode 100755\n\
                similarity index 60%\nrename from crates/f.txt\nrename to other/g.txt\n\
                index 1111111..2222222\n--- a/crates/f.txt\n+++ b/other/g.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n";
    parse(text).apply(source.root()).unwrap();
    assert_eq!(source.read("other/g.txt"), "one\nTWO\nthree\n");
    assert!(source.is_executable("other/g.txt"));
    // git removes the folder that became empty, too.
    assert!(!source.has("crates"));

    let source = Source::new();
    source.write("other/g.txt", "in the way\n");
    assert_eq!(
        source.refused(&parse(text), &EXISTS),
        "p.patch: other/g.txt is already in the source, with other content than the patch adds"
    );
}

#[test]
fn d8_binary_data_symlinks_submodules_and_copies_are_refused() {
    let new = |mode: &str| {
        format!("diff --git a/l b/l\nnew file mode {mode}\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+x\n")
    };
    assert_eq!(malformed(new("120000"), &UNSUPPORTED), "p.patch:2: a symlink (mode 120000)");
    assert_eq!(malformed(new("160000"), &UNSUPPORTED), "p.patch:2: a submodule (mode 160000)");
    assert_eq!(malformed(new("100600"), &MALFORMED), "p.patch:2: mode `100600`, expected 100644 or 100755");
    assert_eq!(
        malformed(
            "diff --git a/l b/l\nindex 1..2 120000\n--- a/l\n+++ b/l\n@@ -1 +1 @@\n-x\n+y\n",
            &UNSUPPORTED
        ),
        "p.patch:2: a symlink (mode 120000)"
    );
    let start = "diff --git a/x.bin b/x.bin\nindex 1111111..2222222 100644\n";
    assert_eq!(
        malformed(format!("{start}GIT binary patch\nliteral 4\nLcmZQz00saA00IC2\n\n"), &UNSUPPORTED),
        "p.patch:3: binary data: `GIT binary patch`"
    );
    assert_eq!(
        malformed(format!("{start}Binary files a/x.bin and b/x.bin differ\n"), &UNSUPPORTED),
        "p.patch:3: a binary change without its data: `Binary files a/x.bin and b/x.bin differ`"
    );
    assert_eq!(
        malformed("Binary files a/x.bin and b/x.bin differ\n", &UNSUPPORTED),
        "p.patch:1: a binary change without its data: `Binary files a/x.bin and b/x.bin differ`"
    );
    let copy = "diff --git a/f b/g\nsimilarity index 100%\ncopy from f\ncopy to g\n";
    assert_eq!(malformed(copy, &UNSUPPORTED), "p.patch:3: a copied file: `copy from f`");
    assert_eq!(malformed("diff --cc f\n", &UNSUPPORTED), "p.patch:1: a merge: `diff --cc f`");
}

#[test]
fn d9_abbreviated_hashes_and_signatures_do_not_change_what_a_patch_does() {
    let with = |index: &str, tail: &str| {
        let start =
            format!("diff --git a/crates/f.txt b/crates/f.txt\nindex {index} 100644\n--- a/crates/f.txt\n");
        parse(&format!("{start}+++ b/crates/f.txt\n{CHANGE}{tail}"))
    };
    let plain = with("1111111..2222222", "");
    assert_eq!(plain, with("11111111..22222222", "-- \n2.47.3\n\n"));
    assert_eq!(plain, with("1..2", "--\n2.47.3 (Apple Git-154)"));
}

#[test]
fn d10_paths_that_leave_the_tree_are_refused() {
    let error = Patch::parse("dd.patch", &fixture_bytes("dd.patch")).unwrap_err();
    assert_eq!(checked(&error, &UNSAFE_PATH), "dd.patch:4: the path `../x` leads upwards with `..`");
    let error = Patch::parse("sym.patch", &fixture_bytes("sym.patch")).unwrap_err();
    assert_eq!(checked(&error, &UNSUPPORTED), "sym.patch:2: a symlink (mode 120000)");
    for (path, why) in [
        ("b/.git/hooks/x", "the path `.git/hooks/x` is in `.git`"),
        ("b/x/.GIT/config", "the path `x/.GIT/config` is in `.git`"),
        ("/etc/passwd", "`/etc/passwd` is absolute"),
        ("b//etc/passwd", "the path `/etc/passwd` is absolute"),
        ("b/./x", "the path `./x` contains `.`"),
        ("b/x/", "the path `x/` has an empty part"),
        (r#""b/x/\056\056/y""#, "the path `x/../y` leads upwards with `..`"),
    ] {
        let text = format!("--- /dev/null\n+++ {path}\n@@ -0,0 +1 @@\n+x\n");
        assert_eq!(malformed(text, &UNSAFE_PATH), format!("p.patch:2: {why}"));
    }
}

#[test]
fn d10_nothing_is_written_through_a_symlink_of_the_tree() {
    let outside = tempfile::tempdir().unwrap();
    fs_err::write(outside.path().join("f"), "x\n").unwrap();
    let source = Source::new();
    symlink(outside.path(), source.root().join("ln")).unwrap();
    symlink(outside.path().join("f"), source.root().join("file")).unwrap();
    let new = "diff --git a/ln/evil b/ln/evil\nnew file mode 100644\n--- /dev/null\n+++ b/ln/evil\n@@ -0,0 +1 @@\n+x\n";
    assert_eq!(source.refused(&parse(new), &UNSAFE_PATH), "p.patch: ln/evil stands beyond the symlink ln");
    let change = "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-x\n+y\n";
    assert_eq!(source.refused(&parse(change), &UNSAFE_PATH), "p.patch: file is a symlink, expected a file");
    assert_eq!(fs_err::read_dir(outside.path()).unwrap().count(), 1);
}

#[test]
fn d11_other_prefixes_are_refused_with_the_way_to_mend_them() {
    let error = Patch::parse("noprefix.patch", &fixture_bytes("noprefix.patch")).unwrap_err();
    assert_eq!(
        checked(&error, &PREFIX),
        "noprefix.patch:1: `diff --git crates/f.txt crates/f.txt` has no a/ and b/ prefixes"
    );
    assert_eq!(
        error.hint_text(),
        Some("make the patch again with `git diff --src-prefix=a/ --dst-prefix=b/`")
    );
    let mnemonic = diff(CHANGE).replace("a/crates", "i/crates").replace("b/crates", "w/crates");
    assert!(
        malformed(mnemonic, &PREFIX).starts_with("p.patch:1: `diff --git i/crates/f.txt w/crates/f.txt`")
    );
    let plain = "--- crates/f.txt\n+++ crates/f.txt\n".to_owned() + CHANGE;
    assert_eq!(malformed(plain, &PREFIX), "p.patch:1: `--- crates/f.txt` has no a/ and b/ prefixes");
    let orig = "--- a/crates/f.txt.orig\n+++ b/crates/f.txt\n".to_owned() + CHANGE;
    assert_eq!(malformed(orig, &MALFORMED), "p.patch:1: names two files, crates/f.txt.orig and crates/f.txt");
}

#[test]
fn d11_a_mail_from_format_patch_is_read_and_a_cut_end_refused() {
    let mail = format!(
        "From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001\nFrom: A <a@example.org>\n\
         Subject: [PATCH] Build on Rust 1.95.0\n\nWhy: the trait differs.\n---\n crates/f.txt | 2 +-\n\
         1 file changed, 1 insertion(+), 1 deletion(-)\n\n{}-- \n2.47.3\n\n",
        diff(CHANGE)
    );
    let source = Source::new();
    parse(&mail).apply(source.root()).unwrap();
    assert_eq!(source.read("crates/f.txt"), "one\nTWO\nthree\n");
    let cut = diff(CHANGE);
    assert_eq!(
        malformed(cut.trim_end(), &MALFORMED),
        "p.patch:8: the patch file ends without a line feed, within a hunk"
    );
}

#[test]
fn d12_empty_and_comment_only_patches_are_refused() {
    let error = Patch::parse("empty.patch", &fixture_bytes("empty.patch")).unwrap_err();
    assert_eq!(checked(&error, &EMPTY), "empty.patch is empty, expected a diff");
    assert_eq!(malformed(" \n\n", &EMPTY), "p.patch is empty, expected a diff");
    assert_eq!(
        malformed("Why: the diff follows one day.\n---\n", &EMPTY),
        "p.patch holds no diff, only other text"
    );
}

#[test]
fn d13_a_new_file_that_exists_says_what_upstream_has() {
    let source = Source::new();
    fixture("newfile.patch").apply(source.root()).unwrap();
    // Five bytes: the patch says that there is no newline.
    assert_eq!(source.read("crates/n.txt"), "hello");
    assert!(source.is_executable("crates/n.txt"));
    assert_eq!(
        source.refused(&fixture("newfile.patch"), &EXISTS),
        "newfile.patch: crates/n.txt is already in the source, with the content that the patch adds"
    );
    source.write("crates/n.txt", "other");
    let error = fixture("newfile.patch").apply(source.root()).unwrap_err();
    assert_eq!(
        checked(&error, &EXISTS),
        "newfile.patch: crates/n.txt is already in the source, with other content than the patch adds"
    );
    assert_eq!(error.hint_text(), Some("if upstream now has this file, drop the patch or this part of it"));
}

#[test]
fn d13_a_newline_at_the_end_is_exact() {
    let source = Source::new();
    source.write("crates/f.txt", "one\ntwo\nthree");
    assert_eq!(
        source.refused(&fixture("gitstyle.patch"), &MISMATCH),
        "gitstyle.patch does not apply to crates/f.txt at `@@ -1,3 +1,3 @@`\n  \
         line 3 expected `three`\n  line 3 found    `three` without a newline at the end of the file"
    );
    let marker = "\\ No newline at end of file\n";
    parse(&diff(&format!("@@ -1,3 +1,3 @@\n one\n two\n-three\n{marker}+three\n")))
        .apply(source.root())
        .unwrap();
    assert_eq!(source.read("crates/f.txt"), "one\ntwo\nthree\n");
    parse(&diff(&format!("@@ -1,3 +1,3 @@\n one\n two\n-three\n+three\n{marker}")))
        .apply(source.root())
        .unwrap();
    assert_eq!(source.read("crates/f.txt"), "one\ntwo\nthree");
    parse(&diff(&format!("@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n{marker}")))
        .apply(source.root())
        .unwrap();
    assert_eq!(source.read("crates/f.txt"), "one\nTWO\nthree");

    source.write("crates/f.txt", "one\ntwo\nthree\nfour\n");
    let cuts = parse(&diff(&format!("@@ -1,2 +1,2 @@\n one\n-two\n+TWO\n{marker}")));
    assert!(
        source
            .refused(&cuts, &MISMATCH)
            .ends_with("the patch ends the file without a newline after line 2, and more lines follow")
    );
}

#[test]
fn deleting_a_file_needs_its_exact_content() {
    let text = "diff --git a/crates/f.txt b/crates/f.txt\ndeleted file mode 100644\n--- a/crates/f.txt\n+++ /dev/null\n\
                @@ -1,3 +0,0 @@\n-one\n-two\n-three\n";
    let source = Source::new();
    let applied = parse(text).apply(source.root()).unwrap();
    assert!(!source.has("crates"));
    assert_eq!(applied.files[0].after, None);
    assert_eq!(source.refused(&parse(text), &ALREADY_APPLIED), "p.patch: crates/f.txt is already deleted");
    let source = Source::new();
    source.write("crates/f.txt", "one\ntwo\nthree\nfour\n");
    assert_eq!(
        source.refused(&parse(text), &MISMATCH),
        "p.patch: crates/f.txt has more lines than the patch deletes with the file"
    );
}

#[test]
fn d14_neither_git_nor_patch_is_needed() {
    // Another process, where no program can be found.
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "source::patch::tests::a_change_is_applied_and_recorded"])
        .env_clear()
        .env("PATH", "/nowhere")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn d15_a_changed_order_of_patches_is_an_error_and_never_a_guess() {
    let first = Patch::parse("1.patch", diff(CHANGE).as_bytes()).unwrap();
    let second =
        Patch::parse("2.patch", diff("@@ -1,3 +1,3 @@\n one\n-TWO\n+2\n three\n").as_bytes()).unwrap();
    let source = Source::new();
    let before = source.snapshot();
    let error = apply_series(&[second.clone(), first.clone()], source.root()).unwrap_err();
    assert!(checked(&error, &MISMATCH).starts_with("2.patch does not apply to crates/f.txt"));
    assert_eq!(source.snapshot(), before);
    apply_series(&[first, second], source.root()).unwrap();
    assert_eq!(source.read("crates/f.txt"), "one\n2\nthree\n");
}

#[test]
fn a_missing_file_and_a_file_in_place_of_a_folder_are_named() {
    let source = Source::new();
    let missing = "--- a/crates/missing\n+++ b/crates/missing\n@@ -1 +1 @@\n-x\n+y\n";
    assert_eq!(
        source.refused(&parse(missing), &MISSING),
        "p.patch: crates/missing is not in the source, expected a file to change"
    );
    let below = "--- /dev/null\n+++ b/crates/f.txt/x\n@@ -0,0 +1 @@\n+x\n";
    assert_eq!(
        source.refused(&parse(below), &MISSING),
        "p.patch: crates/f.txt/x cannot be there, because crates/f.txt is a file"
    );
    let folder = "--- a/crates\n+++ b/crates\n@@ -1 +1 @@\n-x\n+y\n";
    assert_eq!(
        source.refused(&parse(folder), &MISSING),
        "p.patch: crates is a folder or a special file, expected a file"
    );
    let both = "--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n--- /dev/null\n+++ b/n/m\n@@ -0,0 +1 @@\n+x\n";
    assert_eq!(source.refused(&parse(both), &MISMATCH), "the patches make n a file and n/m one below it");
}

#[test]
fn an_insertion_without_context_is_accepted_only_into_an_empty_file() {
    let source = Source::new();
    let text = diff("@@ -0,0 +1 @@\n+x\n");
    assert!(
        source
            .refused(&parse(&text), &MISMATCH)
            .ends_with("the patch expects an empty file, and it is not empty")
    );
    source.write("crates/f.txt", "");
    parse(&text).apply(source.root()).unwrap();
    assert_eq!(source.read("crates/f.txt"), "x\n");
    assert_eq!(
        malformed(diff("@@ -2,0 +3 @@\n+x\n"), &MALFORMED),
        "p.patch:1: `@@ -2,0 +3 @@` has no line of context to check; make it with `-U3`"
    );
}

#[test]
fn hunks_whose_lines_and_headers_disagree_are_refused_with_the_line() {
    let cases: &[(&str, &str)] = &[
        (
            "@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n",
            "p.patch:4: the patch ends within `@@ -1,3 +1,3 @@`: 1 old and 1 new lines are missing",
        ),
        (
            "@@ -1,2 +1,2 @@\n one\n-two\n+TWO\n three\n",
            "p.patch:8: ` three` belongs to nothing; does the hunk above have more lines than its header says?",
        ),
        ("@@ -1,1 +1,3 @@\n one\n two\n", "p.patch:6: ` two` is one line more than `@@ -1,1 +1,3 @@` says"),
        (
            "@@ -1,3 +1,3 @@\n one\ndiff --git a/x b/x\n",
            "p.patch:6: `diff --git a/x b/x` within a hunk that lacks 2 old and 2 new lines",
        ),
        (
            "@@ -1,3 +2,3 @@\n one\n-two\n+TWO\n three\n",
            "p.patch:4: `@@ -1,3 +2,3 @@` does not fit the hunks before it; was the patch edited by hand?",
        ),
        (
            "@@ -5 +5 @@\n-a\n+b\n@@ -1 +1 @@\n-a\n+b\n",
            "p.patch:7: `@@ -1 +1 @@` does not fit the hunks before it; was the patch edited by hand?",
        ),
        ("@@ -1,x +1 @@\n", "p.patch:4: `@@ -1,x +1 @@` is no hunk header"),
        ("@@ -0 +1 @@\n", "p.patch:4: `@@ -0 +1 @@` is no hunk header"),
        ("@@ -99999999999999999999 +1 @@\n", "p.patch:4: `@@ -99999999999999999999 +1 @@` is no hunk header"),
        ("@@ -1 +1 @@\n one\n", "p.patch:4: `@@ -1 +1 @@` changes nothing"),
        ("@@ -1 +1 @@\n\\ No newline\n", "p.patch:5: `\\ No newline` without a line that it is about"),
        (
            "@@ -1,2 +1,2 @@\n-one\n\\ No newline\n+ONE\n two\n",
            "p.patch:1: `@@ -1,2 +1,2 @@` has a line without newline before the last",
        ),
        ("", "p.patch:3: expected a hunk that starts with `@@ -`"),
    ];
    for (hunks, expected) in cases {
        assert_eq!(malformed(diff(hunks), &MALFORMED), *expected);
    }
}

#[test]
fn headers_that_disagree_are_refused_with_the_line() {
    let change = "@@ -1 +1 @@\n-a\n+b\n";
    let cases: &[(String, &str)] = &[
        (
            format!("diff --git a/x b/x\n--- a/y\n+++ b/y\n{change}"),
            "p.patch:1: `diff --git a/x b/x` names other files than the lines below it",
        ),
        (
            format!("diff --git a/x b/y\n--- a/x\n+++ b/y\n{change}"),
            "p.patch:1: names two files, x and y, and no rename",
        ),
        ("diff --git a/x b/y\n".into(), "p.patch:1: names two files and no rename"),
        ("diff --git a/x b/x\nindex 1..2\n".into(), "p.patch:1: changes nothing"),
        ("diff --git a/x b/x\nold mode 100644\nnew mode 100644\n".into(), "p.patch:1: changes nothing"),
        (
            "diff --git a/x b/y\nrename from x\n".into(),
            "p.patch:1: a rename lacks its `rename from` or `rename to` line",
        ),
        (
            "diff --git a/x b/x\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+x\n".into(),
            "p.patch:1: only one of `/dev/null` and `new file mode` or `deleted file mode`",
        ),
        (
            format!("diff --git a/x b/x\n--- a/x\n{change}"),
            "p.patch:3: `@@ -1 +1 @@`, expected a line that starts with `+++ `",
        ),
        (change.into(), "p.patch:1: a hunk without the names of its file before it"),
        (
            format!("--- a/x\n+++ b/x\n{change}--- a/x\n+++ b/x\n{change}"),
            "p.patch:6: x is in the patch twice",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(malformed(text, &MALFORMED), *expected);
    }
}

#[test]
fn an_empty_line_of_context_may_lack_its_space() {
    let source = Source::new();
    source.write("crates/f.txt", "\ntwo\n\n");
    parse(&diff("@@ -1,3 +1,3 @@\n\n-two\n+TWO\n\n")).apply(source.root()).unwrap();
    assert_eq!(source.read("crates/f.txt"), "\nTWO\n\n");
}

#[test]
fn quoted_names_are_those_bytes() {
    let source = Source::new();
    let text = "diff --git \"a/zo\\350 \\\"x\\\".rs\" \"b/zo\\350 \\\"x\\\".rs\"\nnew file mode 100644\n--- /dev/null\n\
                +++ \"b/zo\\350 \\\"x\\\".rs\"\n@@ -0,0 +1 @@\n+x\n";
    parse(text).apply(source.root()).unwrap();
    assert!(source.root().join(OsStr::from_bytes(b"zo\xe8 \"x\".rs")).is_file());
    // git ends names with a space in them by a tab.
    let spaced =
        "diff --git a/a b/c b/a b/c\nnew file mode 100644\n--- /dev/null\n+++ b/a b/c\t\n@@ -0,0 +1 @@\n+x\n";
    parse(spaced).apply(source.root()).unwrap();
    assert_eq!(source.read("a b/c"), "x\n");
}

#[test]
fn an_executable_file_stays_executable() {
    let source = Source::new();
    let path = source.root().join("crates/f.txt");
    fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    fixture("gitstyle.patch").apply(source.root()).unwrap();
    assert_eq!(fs_err::metadata(&path).unwrap().permissions().mode() & 0o777, 0o755);
}

fn text() -> impl Strategy<Value = Vec<u8>> {
    // Few different lines, so that wrong places look right.
    let line =
        prop_oneof![Just("a"), Just("b"), Just("c"), Just(""), Just("\r"), Just("-- "), Just("@@ -1 +1 @@")];
    (proptest::collection::vec(line, 0..30), any::<bool>()).prop_map(|(lines, ends)| {
        let mut text = lines.join("\n").into_bytes();
        if ends && !text.is_empty() {
            text.push(b'\n');
        }
        text
    })
}

/// The diff that another program makes.
fn made(old: &[u8], new: &[u8], context: usize) -> Vec<u8> {
    let mut options = diffy::DiffOptions::new();
    options.set_context_len(context).set_original_filename("a/f").set_modified_filename("b/f");
    options.create_patch_bytes(old, new).to_bytes()
}

proptest! {
    #[test]
    fn applying_a_diff_of_another_program_gives_the_target(old in text(), new in text(), context in 1usize..5) {
        prop_assume!(old != new);
        let source = Source::new();
        source.write("f", &old);
        let patch = Patch::parse("p.patch", &made(&old, &new, context)).unwrap();
        patch.apply(source.root()).unwrap();
        prop_assert_eq!(fs_err::read(source.root().join("f")).unwrap(), new);
    }

    #[test]
    fn mutated_patches_never_panic(
        old in text(),
        new in text(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..8),
    ) {
        let mut bytes = fixture_bytes("two.patch");
        bytes.extend(made(&old, &new, 3));
        bytes.extend(fixture_bytes("ren.patch"));
        bytes.extend(fixture_bytes("newfile.patch"));
        for (at, byte, kind) in changes {
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => drop(bytes.remove(at)),
            }
        }
        if let Ok(patch) = Patch::parse("p.patch", &bytes) {
            let source = Source::new();
            source.write("f", &old);
            let _ = patch.apply(source.root());
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Patch::parse("p.patch", &bytes);
        let _ = Patch::parse("p.patch", &[b"diff --git ", &bytes[..]].concat());
        let _ = Patch::parse("p.patch", &[b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n", &bytes[..]].concat());
    }
}
