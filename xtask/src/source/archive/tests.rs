use std::io::Cursor;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::time::{Duration, SystemTime};

use super::*;
use crate::source::nar::hash_tree;

/// A folder that stands alone in another, so that writing beside it is seen.
struct Place {
    root: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Place { root: tempfile::tempdir().unwrap() }
    }

    fn staging(&self) -> PathBuf {
        self.root.path().join("work/staging")
    }

    fn fixture(&self, name: &str) -> Result<Unpacked> {
        let archives = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/archives");
        fs_err::create_dir_all(self.root.path().join("work")).unwrap();
        unpack_archive(&archives.join(name), &self.staging(), &Limits::default())
    }

    fn tar(&self, stream: &[u8], root: RootRule, limits: &Limits) -> Result<Unpacked> {
        fs_err::create_dir_all(self.root.path().join("work")).unwrap();
        unpack_tar(stream, &self.staging(), root, limits)
    }

    fn made(&self, members: &[Member<'_>]) -> Result<Unpacked> {
        self.tar(&stream(members), RootRule::One, &Limits::default())
    }

    fn read(&self, name: &str) -> String {
        fs_err::read_to_string(self.staging().join(name)).unwrap()
    }

    fn mode(&self, name: &str) -> u32 {
        fs_err::metadata(self.staging().join(name)).unwrap().permissions().mode() & 0o7777
    }

    /// Everything in the outer folder but the staging folder.
    fn strays(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for folder in [self.root.path().to_owned(), self.root.path().join("work")] {
            for entry in fs_err::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if !path.ends_with("work") && !path.ends_with("staging") {
                    found.push(path);
                }
            }
        }
        found
    }
}

enum Member<'a> {
    File(&'a [u8], &'a [u8]),
    Folder(&'a [u8], u32),
    Link(&'a [u8], &'a [u8]),
    Raw(EntryType, &'a [u8]),
}

fn stream(members: &[Member<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for member in members {
        let mut header = Header::new_ustar();
        header.set_mtime(1_700_000_000);
        let (kind, name, mode, link, data): (_, _, _, &[u8], &[u8]) = match *member {
            Member::File(name, data) => (EntryType::Regular, name, 0o644, b"", data),
            Member::Folder(name, mode) => (EntryType::Directory, name, mode, b"", b""),
            Member::Link(name, target) => (EntryType::Symlink, name, 0o777, target, b""),
            Member::Raw(kind, data) => (kind, &b"extension"[..], 0o644, b"", data),
        };
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(2000);
        header.set_gid(2000);
        header.set_size(data.len() as u64);
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
        header.set_cksum();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// What the innermost failure says; checks that nothing was written outside.
#[track_caller]
fn refused(place: &Place, result: Result<Unpacked>, code: &crate::report::error::Code) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.code().id, code.id, "{error}");
    assert!(error.hint_text().is_some());
    assert_eq!(place.strays(), Vec::<PathBuf>::new());
    error.causes().first().map_or_else(|| error.message().to_owned(), Clone::clone)
}

#[test]
fn c1_other_gzip_bytes_of_the_same_tar_give_the_same_tree() {
    let (first, second) = (Place::new(), Place::new());
    assert_eq!(first.fixture("global.tgz").unwrap(), second.fixture("regz.tgz").unwrap());
    assert_eq!(hash_tree(&first.staging()).unwrap(), hash_tree(&second.staging()).unwrap());
}

#[test]
fn c2_the_recorded_revision_must_be_the_pinned_one() {
    let unpacked = Place::new().fixture("global.tgz").unwrap();
    let revision = |digit: &str| digit.repeat(40).parse::<Revision>().unwrap();
    assert_eq!(unpacked.revision, Some(revision("a")));
    unpacked.check_revision(&revision("a")).unwrap();
    let error = unpacked.check_revision(&revision("b")).unwrap_err();
    assert_eq!(error.exit(), crate::report::error::Exit::Refusal);
    assert_eq!(
        error.to_string(),
        "the archive is of revision aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, \
             PROVENANCE pins bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
    );
    let silent = Unpacked { revision: None, ..unpacked };
    silent.check_revision(&revision("b")).unwrap();
}

#[test]
fn c2_two_different_recorded_revisions_are_refused_and_other_comments_ignored() {
    let comment = |value: &str| format!("{} comment={value}\n", value.len() + 12).into_bytes();
    let (a, b) = (comment(&"a".repeat(40)), comment(&"b".repeat(40)));
    let global = EntryType::XGlobalHeader;
    let place = Place::new();
    let result = place.made(&[Member::Raw(global, &a), Member::Raw(global, &b)]);
    assert!(refused(&place, result, &LAYOUT).starts_with("the archive names two revisions, aaaa"));
    let other = comment("made by hand, on a Monday, with great care, a");
    let unpacked = Place::new().made(&[Member::Raw(global, &other), Member::File(b"r/f", b"x")]).unwrap();
    assert_eq!(unpacked.revision, None);
}

#[test]
fn c3_a_global_pax_header_is_no_member() {
    let place = Place::new();
    let unpacked = place.fixture("global.tgz").unwrap();
    assert_eq!((unpacked.entries, unpacked.bytes), (2, 1));
    let names: Vec<_> =
        fs_err::read_dir(place.staging()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["f"]);
    assert_eq!(place.read("f"), "x");
}

#[test]
fn c4_a_member_below_a_symlink_is_refused() {
    let place = Place::new();
    let result = place.fixture("symthrough.tgz");
    assert_eq!(refused(&place, result, &UNSAFE), r#""r/d/evil" stands below the symlink "d""#);
    let place = Place::new();
    let result = place.made(&[
        Member::Link(b"r/a", b"."),
        Member::File(b"r/a/x", b"evil"),
        Member::Folder(b"r", 0o755),
    ]);
    assert_eq!(refused(&place, result, &UNSAFE), r#""r/a/x" stands below the symlink "a""#);
}

#[test]
fn c4_symlinks_that_leave_the_tree_are_refused_however_they_are_spelled() {
    let cases: &[(&[(&str, &str)], &str)] = &[
        (&[("a", "../x")], r#"the symlink "a" to "../x" leaves the tree"#),
        (&[("d/a", "../../x")], r#"the symlink "d/a" to "../../x" leaves the tree"#),
        (&[("a", "/etc/passwd")], r#"the symlink "a" to "/etc/passwd" is absolute"#),
        (&[("a", "")], r#"the symlink "a" to "" has no usable target"#),
        (&[("a", "b/../../x")], r#"the symlink "a" to "b/../../x" leaves the tree"#),
        // By its letters it stays inside; through the first link it does not.
        (&[("d/e/l", "../.."), ("m", "d/e/l/../x")], r#"the symlink "m" to "d/e/l/../x" leaves the tree"#),
        (&[("a", "."), ("m", "a/a/a/../x")], r#"the symlink "m" to "a/a/a/../x" leaves the tree"#),
        (&[("a", "a")], r#"the symlink "a" to "a" goes round in circles"#),
    ];
    for (links, expected) in cases {
        let place = Place::new();
        let names: Vec<_> =
            links.iter().map(|(name, target)| (format!("r/{name}"), target.as_bytes())).collect();
        let members: Vec<_> =
            names.iter().map(|(name, target)| Member::Link(name.as_bytes(), target)).collect();
        assert_eq!(refused(&place, place.made(&members), &UNSAFE), *expected);
        assert!(!place.staging().join("a").is_symlink());
    }
}

#[test]
fn symlinks_inside_the_tree_are_kept() {
    let place = Place::new();
    place
        .made(&[
            Member::Link(b"r/first", b"d/second"),
            Member::Link(b"r/d/second", b"../f"),
            Member::Link(b"r/dangling", b"nowhere"),
            Member::File(b"r/f", b"x"),
        ])
        .unwrap();
    assert_eq!(place.read("first"), "x");
    assert_eq!(fs_err::read_link(place.staging().join("dangling")).unwrap(), Path::new("nowhere"));
}

#[test]
fn c5_a_folder_over_a_symlink_changes_no_foreign_permissions() {
    let place = Place::new();
    let outside = place.root.path().join("outside");
    fs_err::create_dir(&outside).unwrap();
    fs_err::set_permissions(&outside, std::fs::Permissions::from_mode(0o700)).unwrap();
    let error = place.fixture("symdir_chmod.tgz").unwrap_err();
    assert_eq!(error.causes(), [r#""r/d/" is a symlink and then a folder"#]);
    assert_eq!(fs_err::metadata(&outside).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn c6_absolute_names_dots_links_and_special_files_are_refused_by_name() {
    for (fixture, code, expected) in [
        ("abs.tgz", &UNSAFE, r#""/kiln-abs-evil" is an absolute name"#),
        ("dotdot.tgz", &UNSAFE, r#""r/../../evil" leads upwards with `..`"#),
        ("hard.tgz", &UNSAFE, r#""r/h" is a hard link"#),
        ("fifo.tgz", &UNSAFE, r#""r/p" is a pipe"#),
        ("dup.tgz", &LAYOUT, r#""r/f" is in the archive twice"#),
    ] {
        let place = Place::new();
        assert_eq!(refused(&place, place.fixture(fixture), code), expected);
    }
    assert!(!Path::new("/kiln-abs-evil").exists());
}

#[test]
fn c6_names_from_pax_and_gnu_headers_obey_the_same_rules() {
    for (kind, data) in
        [(EntryType::XHeader, &b"21 path=r/../../evil\n"[..]), (EntryType::GNULongName, b"r/../../evil\0")]
    {
        let place = Place::new();
        let result = place.made(&[Member::Raw(kind, data), Member::File(b"r/f", b"x")]);
        assert_eq!(refused(&place, result, &UNSAFE), r#""r/../../evil" leads upwards with `..`"#);
    }
    let place = Place::new();
    let result = place.made(&[Member::Raw(EntryType::XHeader, b"8 size=1\n"), Member::File(b"r/f", b"x")]);
    assert_eq!(refused(&place, result, &DAMAGED), "a pax header is malformed");
    let place = Place::new();
    let result = place.made(&[Member::Raw(EntryType::XHeader, b"9 size=1\n"), Member::File(b"r/f", b"x")]);
    assert_eq!(refused(&place, result, &LAYOUT), "a member's size is in a pax header");
}

#[test]
fn long_names_are_taken_from_pax_and_gnu_headers() {
    let long = format!("r/{}/f", "d".repeat(200));
    let pax = format!("{} path={long}\n", long.len() + 10);
    for (kind, data) in [(EntryType::XHeader, pax), (EntryType::GNULongName, format!("{long}\0"))] {
        let place = Place::new();
        place.made(&[Member::Raw(kind, data.as_bytes()), Member::File(b"r/short", b"x")]).unwrap();
        assert_eq!(place.read(&long[2..]), "x");
    }
}

#[test]
fn c7_truncation_and_trailing_garbage_are_refused() {
    let place = Place::new();
    let result = place.fixture("trunc.tgz");
    assert_eq!(refused(&place, result, &DAMAGED), "the compressed file ends too early, so it was cut off");
    let place = Place::new();
    let result = place.fixture("trail.tgz");
    assert_eq!(
        refused(&place, result, &DAMAGED),
        "the compressed file is corrupt, or something follows its end"
    );
}

#[test]
fn c7_every_way_of_cutting_a_tar_stream_is_refused() {
    let whole = stream(&[Member::Folder(b"r/", 0o755), Member::File(b"r/f", &[7; 700])]);
    Place::new().tar(&whole, RootRule::One, &Limits::default()).unwrap();
    for length in (0..whole.len()).step_by(64) {
        let place = Place::new();
        let error = place.tar(&whole[..length], RootRule::One, &Limits::default()).unwrap_err();
        assert_eq!(error.code().id, DAMAGED.id, "{length}: {error}");
        match length {
            1088..1724 => assert!(error.message().starts_with(r#"the archive ends within "r/f""#)),
            2048 | 2560.. => assert!(error.message().starts_with("the archive ends without its end")),
            _ => {}
        }
    }
    for extra in [&b"x"[..], &[0, 0, 1]] {
        let place = Place::new();
        let longer = [&whole, extra].concat();
        let result = place.tar(&longer, RootRule::One, &Limits::default());
        assert_eq!(refused(&place, result, &DAMAGED), "the archive has something behind its end");
    }
    // Padding up to a record of 20 blocks is normal.
    let padded = [&whole[..], &[0; 10240]].concat();
    Place::new().tar(&padded, RootRule::One, &Limits::default()).unwrap();
}

#[test]
fn c7_every_way_of_cutting_a_gzip_file_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let archive = root.path().join("a.tgz");
    let whole = gzip(&stream(&[Member::Folder(b"r/", 0o755), Member::File(b"r/f", &[7; 700])]));
    for length in 2..whole.len() {
        fs_err::write(&archive, &whole[..length]).unwrap();
        let into = root.path().join(format!("{length}"));
        let error = unpack_archive(&archive, &into, &Limits::default()).unwrap_err();
        assert_eq!(error.code().id, DAMAGED.id, "{length}: {error}");
    }
}

#[test]
fn c13_names_that_differ_in_case_alone_are_refused() {
    let place = Place::new();
    let result = place.fixture("casefold.tgz");
    assert_eq!(refused(&place, result, &LAYOUT), r#""README" and "Readme" differ in case alone"#);
    for (first, second) in [
        (Member::Folder(b"r/Dir", 0o755), Member::File(b"r/dir", b"")),
        (Member::File(b"r/Dir/a", b""), Member::File(b"r/dir/b", b"")),
        (Member::File("r/\u{c9}".as_bytes(), b""), Member::File("r/\u{e9}".as_bytes(), b"")),
        (Member::File("r/\u{17f}".as_bytes(), b""), Member::File(b"r/s", b"")),
    ] {
        let place = Place::new();
        let said = refused(&place, place.made(&[first, second]), &LAYOUT);
        assert!(said.ends_with("differ in case alone"), "{said}");
    }
}

#[test]
fn c14_names_that_are_not_utf8_are_unpacked_and_shown_escaped() {
    let place = Place::new();
    place.made(&[Member::File(b"r/zo\xe8.rs", b"x")]).unwrap();
    assert!(place.staging().join(OsStr::from_bytes(b"zo\xe8.rs")).is_file());
    let place = Place::new();
    let result =
        place.made(&[Member::File(b"r/zo\xe8\x1b[2J", b"x"), Member::File(b"r/zo\xe8\x1b[2J", b"x")]);
    assert_eq!(refused(&place, result, &LAYOUT), r#""r/zo\xE8\u{1b}[2J" is in the archive twice"#);
}

#[test]
fn c15_dangerous_modes_and_owners_are_dropped_and_the_executable_bit_kept() {
    let place = Place::new();
    place.fixture("setuid.tgz").unwrap();
    assert_eq!(place.mode("s") & 0o7022, 0);
    assert_eq!(place.mode("s") & 0o700, 0o700);
    assert_eq!(place.mode("w") & 0o7133, 0);

    let place = Place::new();
    fs_err::create_dir_all(place.staging()).unwrap();
    fs_err::set_permissions(place.staging(), std::fs::Permissions::from_mode(0o710)).unwrap();
    place
        .made(&[Member::Folder(b"./", 0o777), Member::Folder(b"./r/", 0o777), Member::File(b"./r/f", b"")])
        .unwrap();
    assert_eq!(place.mode(""), 0o710);
    let owner = fs_err::metadata(place.root.path()).unwrap().uid();
    assert_eq!(fs_err::metadata(place.staging().join("f")).unwrap().uid(), owner);
}

#[test]
fn c15_modes_are_safe_under_every_umask() {
    // The umask belongs to the process, so another one runs the test above.
    let name =
        "source::archive::tests::c15_dangerous_modes_and_owners_are_dropped_and_the_executable_bit_kept";
    for umask in ["000", "027", "077"] {
        let output = std::process::Command::new("sh")
            .args(["-c", r#"umask "$1" && exec "$2" --exact "$3""#, "sh", umask])
            .arg(std::env::current_exe().unwrap())
            .arg(name)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "umask {umask}: {said}");
    }
}

#[test]
fn c16_a_git_lfs_pointer_is_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";
    let place = Place::new();
    let result = place.made(&[Member::File(b"r/weights.bin", pointer)]);
    assert_eq!(
        refused(&place, result, &LFS_POINTER),
        r#""r/weights.bin" is a Git LFS pointer, expected the content that it stands for"#
    );
}

#[test]
fn c16_an_empty_submodule_folder_is_named() {
    let modules = b"[submodule \"x\"]\n\tpath = third/x\n\turl = https://example.org/x\n";
    let list = || Member::File(b"r/.gitmodules", modules);
    let place = Place::new();
    let result = place.made(&[list(), Member::Folder(b"r/third/x/", 0o755)]);
    assert_eq!(
        refused(&place, result, &SUBMODULE),
        r#""third/x" is empty, expected the submodule that .gitmodules lists"#
    );
    Place::new().made(&[list(), Member::File(b"r/third/x/f", b"")]).unwrap();
}

#[test]
fn c17_an_unexpected_top_level_is_refused_by_name() {
    for (fixture, code, expected) in [
        (
            "flat.tgz",
            &LAYOUT,
            r#""Cargo.toml" stands at the top of the archive, expected one folder that holds everything"#,
        ),
        ("noroot.tgz", &LAYOUT, r#"the archive has two folders at its top, "a" and "b", expected one"#),
        ("empty.tgz", &LAYOUT, "the archive is empty"),
    ] {
        let place = Place::new();
        assert_eq!(refused(&place, place.fixture(fixture), code), expected);
    }
}

#[test]
fn c17_files_that_are_no_gzip_are_named() {
    for (fixture, expected) in
        [("plain.tar", "a plain .tar that was never compressed"), ("html.tgz", "an HTML page")]
    {
        let place = Place::new();
        let error = place.fixture(fixture).unwrap_err();
        assert_eq!(error.code().id, NOT_AN_ARCHIVE.id);
        let said = error.message();
        assert!(said.ends_with(&format!("{fixture} is {expected}, expected a gzip-compressed tar file")));
    }
    assert_eq!(other_format(b""), Some("empty"));
    assert_eq!(other_format(b"\xef\xbb\xbf\n <HTML>"), Some("an HTML page"));
    assert_eq!(other_format(b"PK\x03\x04"), Some("a zip file"));
    assert_eq!(other_format(b"hello"), Some("not a gzip file"));
    assert_eq!(other_format(b"\x1f\x8b\x08"), None);
}

#[test]
fn c17_all_gzip_members_are_read() {
    let place = Place::new();
    let unpacked = place.fixture("twomember.tgz").unwrap();
    assert_eq!(unpacked, Place::new().fixture("global.tgz").unwrap());
    assert_eq!(place.read("f"), "x");
}

#[test]
fn c17_a_bare_tree_is_taken_where_it_is_expected() {
    let place = Place::new();
    let bare = stream(&[Member::File(b"Cargo.toml", b"x"), Member::File(b"src/lib.rs", b"y")]);
    place.tar(&bare, RootRule::Bare, &Limits::default()).unwrap();
    assert_eq!((place.read("Cargo.toml"), place.read("src/lib.rs")), ("x".into(), "y".into()));
}

#[test]
fn c18_unpacked_files_are_as_new_as_now() {
    let place = Place::new();
    place.fixture("global.tgz").unwrap();
    let modified = fs_err::metadata(place.staging().join("f")).unwrap().modified().unwrap();
    assert!(modified > SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_001));
}

#[test]
fn c19_a_marker_of_ours_in_the_archive_stays_inside_the_tree() {
    let place = Place::new();
    place
        .made(&[Member::File(b"r/.kiln-complete", b"forged"), Member::File(b"r/installed.json", b"{}")])
        .unwrap();
    assert_eq!(place.strays(), Vec::<PathBuf>::new());
    assert_eq!(place.read(".kiln-complete"), "forged");
    let place = Place::new();
    let result = place.made(&[Member::Link(b"r/.kiln-complete", b"../.kiln-complete")]);
    refused(&place, result, &UNSAFE);
}

#[test]
fn c19_an_expansion_bomb_is_stopped_before_it_is_unpacked() {
    let mut header = Header::new_ustar();
    header.set_size(4 << 30);
    header.set_mode(0o644);
    header.as_old_mut().name[..3].copy_from_slice(b"r/f");
    header.set_cksum();
    let place = Place::new();
    fs_err::create_dir_all(place.root.path().join("work")).unwrap();
    let bomb = Cursor::new(header.as_bytes().to_vec()).chain(io::repeat(0));
    let result = unpack_tar(bomb, &place.staging(), RootRule::One, &Limits::default());
    assert_eq!(
        refused(&place, result, &TOO_BIG),
        r#"with "r/f" the archive unpacks to more than 536870912 bytes"#
    );
    assert!(!place.staging().join("f").exists());
}

#[test]
fn c19_limits_hold_for_members_names_and_endless_padding() {
    let limits = Limits { entries: 3, bytes: 10, name: 20 };
    let place = Place::new();
    let many: Vec<_> = [&b"r/a"[..], b"r/b", b"r/c", b"r/d"].map(|name| Member::File(name, b"")).into();
    let result = place.tar(&stream(&many), RootRule::One, &limits);
    assert_eq!(refused(&place, result, &TOO_BIG), "the archive has more than 3 members");
    let place = Place::new();
    let deep = stream(&[Member::File(b"r/a/b/c/d", b"")]);
    let result = place.tar(&deep, RootRule::One, &limits);
    assert_eq!(refused(&place, result, &TOO_BIG), "the archive has more than 3 members");
    let place = Place::new();
    let long = stream(&[Member::File(b"r/aaaaaaaaaaaaaaaaaaaaaaaa", b"")]);
    let result = place.tar(&long, RootRule::One, &limits);
    assert_eq!(
        refused(&place, result, &TOO_BIG),
        r#"a member's name has 26 bytes, more than 20; it starts "r/aaaaaaaaaaaaaaaaaa""#
    );
    let place = Place::new();
    fs_err::create_dir_all(place.root.path().join("work")).unwrap();
    let endless = Cursor::new(stream(&[Member::File(b"r/a", b"")])).chain(io::repeat(0));
    let result = unpack_tar(endless, &place.staging(), RootRule::One, &limits);
    assert_eq!(refused(&place, result, &TOO_BIG), "the uncompressed archive is larger than its limit");
}

#[test]
fn a_staging_folder_with_something_in_it_is_not_used() {
    let place = Place::new();
    fs_err::create_dir_all(place.staging().join("old")).unwrap();
    assert_eq!(place.fixture("global.tgz").unwrap_err().code().id, NOT_EMPTY.id);
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_headers_never_panic_or_write_outside(
        changes in proptest::collection::vec((0usize..2048, proptest::num::u8::ANY), 1..6),
    ) {
        let mut bytes = stream(&[
            Member::Raw(EntryType::XHeader, b"15 path=r/long\n"),
            Member::File(b"r/f", b"contents"),
            Member::Link(b"r/l", b"f"),
        ]);
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        for start in [0, 1024, 2048] {
            let mut header = Header::new_old();
            header.as_mut_bytes().copy_from_slice(&bytes[start..start + 512]);
            header.set_cksum();
            bytes[start..start + 512].copy_from_slice(header.as_bytes());
        }
        let place = Place::new();
        let _ = place.tar(&bytes, RootRule::One, &Limits::default());
        proptest::prop_assert_eq!(place.strays(), Vec::<PathBuf>::new());
    }
}
