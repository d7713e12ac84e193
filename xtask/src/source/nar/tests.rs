use std::os::unix::fs::symlink;

use super::*;
use crate::base::hash::Sha256;

fn write(path: impl AsRef<Path>, contents: impl AsRef<[u8]>) {
    let path = path.as_ref();
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    fs_err::write(path, contents).unwrap();
}

fn mode(path: impl AsRef<Path>, mode: u32) {
    fs_err::set_permissions(path.as_ref(), std::fs::Permissions::from_mode(mode)).unwrap();
}

fn hex(root: &Path) -> String {
    Sha256::from_bytes(*hash_tree(root).unwrap().as_bytes()).to_string()
}

fn string(text: &[u8]) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

#[test]
fn an_empty_folder_has_the_hash_that_nix_gives_it() {
    let root = tempfile::tempdir().unwrap();
    // Widely seen as the hash of a fetch that brought nothing.
    assert_eq!(
        hash_tree(root.path()).unwrap().to_string(),
        "sha256-pQpattmS9VmO3ZIQUFn66az8GSmB4IvYhTTCFn6SUmo="
    );
}

#[test]
fn trees_have_the_hashes_of_archives_that_nix_wrote() {
    // The sha256 of `03-dir-one-empty-file.nar` and `07-nested-dirs.nar` among the test data of the crate
    // nix-nar 0.6.0, whose inputs are remade here.
    let root = tempfile::tempdir().unwrap();
    let nested = root.path().join("nested");
    write(nested.join("01-an-empty-file"), "");
    write(nested.join("02-some-dir/small-file"), "This is a test file.\n");
    write(nested.join("02-some-dir/more-depth/deep-empty-file"), "");
    symlink("../01-an-empty-file", nested.join("02-some-dir/link-to-an-empty-file")).unwrap();
    write(nested.join("03-executable-file.exe"), "");
    mode(nested.join("03-executable-file.exe"), 0o755);
    assert_eq!(hex(&nested), "e3bdbbac48770522a7daee3d06774fc1ca666e775bdf94c519594891ec63dffe");
}

#[test]
fn the_archive_is_what_the_specification_says() {
    let root = tempfile::tempdir().unwrap();
    write(root.path().join("b"), "12345678");
    write(root.path().join("a"), "x");
    mode(root.path().join("a"), 0o700);
    symlink("b", root.path().join("B")).unwrap();
    let archive: Vec<u8> = [
        &b"nix-archive-1"[..],
        b"(",
        b"type",
        b"directory",
        b"entry",
        b"(",
        b"name",
        b"B",
        b"node",
        b"(",
        b"type",
        b"symlink",
        b"target",
        b"b",
        b")",
        b")",
        b"entry",
        b"(",
        b"name",
        b"a",
        b"node",
        b"(",
        b"type",
        b"regular",
        b"executable",
        b"",
        b"contents",
        b"x",
        b")",
        b")",
        b"entry",
        b"(",
        b"name",
        b"b",
        b"node",
        b"(",
        b"type",
        b"regular",
        b"contents",
        b"12345678",
        b")",
        b")",
        b")",
    ]
    .into_iter()
    .flat_map(string)
    .collect();
    assert_eq!(hex(root.path()), Sha256::of(&archive).to_string());
}

#[test]
fn a_file_longer_than_the_buffers_counts_byte_for_byte() {
    let root = tempfile::tempdir().unwrap();
    let contents: Vec<u8> = (0..7 * CHUNK + 13).map(|i| (i % 251) as u8).collect();
    write(root.path().join("f"), &contents);
    let mut archive: Vec<u8> = [
        &b"nix-archive-1"[..],
        b"(",
        b"type",
        b"directory",
        b"entry",
        b"(",
        b"name",
        b"f",
        b"node",
        b"(",
        b"type",
        b"regular",
        b"contents",
    ]
    .into_iter()
    .flat_map(string)
    .collect();
    archive.extend(string(&contents));
    for _ in 0..3 {
        archive.extend(string(b")"));
    }
    assert_eq!(hex(root.path()), Sha256::of(&archive).to_string());
}

#[test]
fn only_names_contents_and_the_executable_bit_count() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("f");
    write(&file, "x");
    let first = hash_tree(root.path()).unwrap();
    mode(&file, 0o666);
    mode(root.path(), 0o700);
    assert_eq!(hash_tree(root.path()).unwrap(), first);
    mode(&file, 0o744);
    assert_ne!(hash_tree(root.path()).unwrap(), first);
    mode(&file, 0o644);
    write(&file, "y");
    assert_ne!(hash_tree(root.path()).unwrap(), first);
}

#[test]
fn c14_names_that_are_not_utf8_are_hashed() {
    let root = tempfile::tempdir().unwrap();
    write(root.path().join(OsStr::from_bytes(b"zo\xe8.rs")), "x");
    let archive: Vec<u8> = [
        &b"nix-archive-1"[..],
        b"(",
        b"type",
        b"directory",
        b"entry",
        b"(",
        b"name",
        b"zo\xe8.rs",
        b"node",
        b"(",
        b"type",
        b"regular",
        b"contents",
        b"x",
        b")",
        b")",
        b")",
    ]
    .into_iter()
    .flat_map(string)
    .collect();
    assert_eq!(hex(root.path()), Sha256::of(&archive).to_string());
}

#[test]
fn a_pipe_a_file_as_root_and_a_missing_root_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("tree/socket");
    fs_err::create_dir(root.path().join("tree")).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let error = hash_tree(&root.path().join("tree")).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{} is a device, a pipe or a socket, expected files, folders and symlinks only",
            socket.display()
        )
    );
    write(root.path().join("file"), "");
    assert_eq!(hash_tree(&root.path().join("file")).unwrap_err().code().id, NOT_A_TREE.id);
    assert!(hash_tree(&root.path().join("missing")).is_err());
}
