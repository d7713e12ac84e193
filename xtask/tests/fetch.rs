//! Getting the source, end to end: a server on this machine that misbehaves, archives that do, and a store that is full,
//! read-only or oddly named. No other network.

mod support;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use support::server::{Server, answer};
use support::{REVISION, World, finished};
use xtask::base::hash::Sha256;

/// Lets PROVENANCE name `server`.
fn point_to(world: &World, server: &Server) {
    world.pin();
    world.edit("work/PROVENANCE", "https://example.invalid/upstream", &server.repository());
}

fn good(world: &World) -> Vec<u8> {
    answer("200 OK", &world.archive(REVISION, 6))
}

fn downloads(world: &World) -> Vec<String> {
    names(&world.path("store/downloads"))
}

fn names(folder: &PathBuf) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn c8_no_bad_answer_is_kept_and_the_next_setup_succeeds() {
    let world = World::new();
    let whole = good(&world);
    let cases: [(&str, Vec<u8>, &str); 8] = [
        ("missing", answer("404 Not Found", b"no such revision"), "404"),
        ("busy for an hour", answer("429 Too Many Requests\r\nRetry-After: 3600", b"slow down"), "429"),
        ("busy", answer("429 Too Many Requests\r\nRetry-After: 0", b"slow down"), "429"),
        ("broken", answer("500 Internal Server Error\r\nRetry-After: 0", b"oops"), "500"),
        ("a page", answer("200 OK\r\nContent-Type: text/html", b"<!DOCTYPE html><p>log in"), "log in"),
        ("empty", answer("200 OK", b""), "an empty body"),
        ("text", answer("200 OK", b"not an archive at all"), "not an archive"),
        // A gzip file that is no tar: only unpacking can tell.
        ("half", answer("200 OK", &world.archive(REVISION, 6)[..600]), "cannot be used"),
    ];
    for (name, bad, says) in cases {
        let server = Server::new(vec![bad]);
        point_to(&world, &server);
        let run = world.run(&["setup"]);
        assert_eq!(run.status, 1, "{name}: {}", run.stderr);
        assert!(run.stderr.contains(says) && run.stderr.contains("127.0.0.1"), "{name}: {}", run.stderr);
        assert!(
            run.stderr.contains("error[KILN-06") && run.stderr.contains("hint: "),
            "{name}: {}",
            run.stderr
        );
        assert!(!downloads(&world).contains(&format!("{REVISION}.tar.gz")), "{name} was kept");
        assert_eq!(names(&world.path("store/pristine")), Vec::<String>::new(), "{name} left a tree");
    }
    let server = Server::new(vec![whole]);
    point_to(&world, &server);
    world.run(&["setup"]).exits(0);
    assert_eq!(downloads(&world), [format!("{REVISION}.tar.gz")]);
}

#[test]
fn c2_c9_a_server_that_fails_twice_is_asked_again_for_the_full_revision() {
    let world = World::new();
    let bad = || answer("500 Internal Server Error\r\nRetry-After: 0", b"");
    let server = Server::new(vec![bad(), bad(), good(&world)]);
    point_to(&world, &server);
    world.run(&["setup"]).exits(0).says("trying again in 0 s");
    assert_eq!(server.asked(), vec![format!("GET /x/archive/{REVISION}.tar.gz HTTP/1.1"); 3]);
}

#[test]
fn c9_c10_a_damaged_archive_in_the_store_is_fetched_again() {
    let world = World::new();
    let server = Server::new(vec![good(&world)]);
    point_to(&world, &server);
    fs::create_dir_all(world.path("store/downloads")).unwrap();
    let kept = world.path(&format!("store/downloads/{REVISION}.tar.gz"));
    fs::write(&kept, &world.archive(REVISION, 6)[..700]).unwrap();
    world.run(&["setup"]).exits(0).says("is damaged, fetching it again");
    assert_eq!(server.asked().len(), 1);

    // And a server that keeps giving a damaged one is not asked for ever.
    let world = World::new();
    let server = Server::new(vec![answer("200 OK", &world.archive(REVISION, 6)[..700])]);
    point_to(&world, &server);
    world.run(&["setup"]).exits(1).says("error[KILN-0612]");
    assert_eq!(server.asked().len(), 1);
}

#[test]
fn c1_an_archive_that_was_compressed_anew_is_refused_and_the_tree_is_told_to_be_equal() {
    let world = World::new();
    let (pinned, served) = (world.archive(REVISION, 9), world.archive(REVISION, 1));
    let server = Server::new(vec![answer("200 OK", &served)]);
    point_to(&world, &server);
    let pinned = Sha256::of(&pinned);
    world.edit("work/PROVENANCE", "lock = ", &format!("archive-sha256 = \"{pinned}\"\nlock = "));
    world
        .run(&["setup"])
        .exits(70)
        .says("error[KILN-0385]")
        .says("the compressed bytes differ, the uncompressed tree is equal")
        .says(&pinned.to_string())
        .says(&Sha256::of(&served).to_string())
        .says("hint: ");

    // The documented way out: the new hash, or none.
    world.edit("work/PROVENANCE", &pinned.to_string(), &Sha256::of(&served).to_string());
    world.run(&["setup"]).exits(0);
}

#[test]
fn c1_another_tree_under_the_pinned_name_is_told_apart_from_another_compression() {
    let world = World::new();
    let pinned = Sha256::of(&world.archive(REVISION, 6));
    world.pin();
    fs::write(world.path("upstream/extra"), "x").unwrap();
    let archive = world.path("other.tar.gz");
    fs::write(&archive, world.archive(REVISION, 6)).unwrap();
    world.edit("work/PROVENANCE", "lock = ", &format!("archive-sha256 = \"{pinned}\"\nlock = "));
    let run = world.run(&["setup", "--offline", "--source", archive.to_str().unwrap()]);
    run.exits(70).says("error[KILN-0385]").says("the tree in it is not the pinned one either");
}

#[test]
fn c2_a_moved_tag_is_refused_although_the_files_are_equal() {
    let world = World::new();
    let moved = "f".repeat(40);
    let server = Server::new(vec![answer("200 OK", &world.archive(&moved, 6))]);
    point_to(&world, &server);
    world.run(&["setup"]).exits(70).says("error[KILN-0616]").says(&moved).says(REVISION);
}

#[test]
fn c14_names_that_are_not_utf8_in_the_archive_work_and_in_the_store_are_refused_early() {
    let world = World::new();
    fs::write(world.path("upstream").join(OsStr::from_bytes(b"zo\xe8.rs")), "// a name in Latin-1").unwrap();
    world.pin();
    let archive = world.path("upstream.tar.gz");
    fs::write(&archive, world.archive(REVISION, 6)).unwrap();
    world.run(&["setup", "--offline", "--source", archive.to_str().unwrap()]).exits(0);

    let odd = world.path("store").join(OsStr::from_bytes(b"\xe8"));
    let mut command = world.command(&["setup", "--offline", "--source"]);
    command.arg(&archive).env("KILN_STORE", &odd);
    finished(command.output().unwrap()).exits(1).says("UTF-8").says("hint: ").says("--store");
    assert!(!odd.exists(), "nothing is fetched into a store that cannot be used");
}

#[test]
fn c19_the_archive_cannot_forge_what_setup_writes() {
    let world = World::new();
    for name in ["entry.json", "record.json", ".cargo-ok", "x.lock", "tree"] {
        fs::write(world.path("upstream").join(name), "{\"tree\": \"forged\"}").unwrap();
    }
    for (name, target) in [("locks", "crates"), ("backends", "tree"), ("link.json", "entry.json")] {
        symlink(target, world.path("upstream").join(name)).unwrap();
    }
    world.pin();
    let archive = world.path("upstream.tar.gz");
    fs::write(&archive, world.archive(REVISION, 6)).unwrap();
    world.run(&["setup", "--offline", "--source", archive.to_str().unwrap()]).exits(0);
    let entry = fs::read_dir(world.path("store/sources")).unwrap().next().unwrap().unwrap().path();
    assert!(!fs::read_to_string(entry.join("entry.json")).unwrap().contains("forged"));
    assert!(fs::read_to_string(entry.join("tree/entry.json")).unwrap().contains("forged"));
    world.run(&["build", "--arch", "sm_86"]).exits(0);

    // Without our own stamp the entry does not exist, whatever the tree holds.
    fs::remove_file(entry.join("entry.json")).unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(1).says("error[KILN-0389]");
}

#[test]
fn c18_an_edited_file_with_the_time_of_the_commit_is_not_reused() {
    let world = World::new();
    world.setup();
    let entry = fs::read_dir(world.path("store/sources")).unwrap().next().unwrap().unwrap().path();
    let file = entry.join("tree/crates/rustc-codegen-cuda/src/lib.rs");
    let before = fs::metadata(&file).unwrap().modified().unwrap();
    fs::write(&file, "// edited\n").unwrap();
    fs::File::options().append(true).open(&file).unwrap().set_modified(before).unwrap();
    world.run(&["build", "--arch", "sm_86"]).exits(70).says("error[KILN-0388]");
    world.setup();
    assert_ne!(fs::read_to_string(&file).unwrap(), "// edited\n");
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn d15_every_list_of_patches_starts_from_the_pristine_tree() {
    let mut world = World::new();
    let second = "A line more.\n\n--- a/rust-toolchain.toml\n+++ b/rust-toolchain.toml\n@@ -1,3 +1,4 @@\n \
                  # Must not decide anything: the pinned toolchain builds the backend.\n+# Patched.\n \
                  [toolchain]\n channel = \"nightly-2001-01-01\"\n";
    let other = world.path("work/backend-patches/0002-more.patch");
    let tree = |world: &World| {
        let line = world.run(&["doctor"]).exits(0).stdout;
        let line = line.lines().find(|line| line.contains("ok   source")).unwrap().to_owned();
        let tree = PathBuf::from(line.split_whitespace().last().unwrap());
        (fs::read_to_string(tree.join("rust-toolchain.toml")).unwrap().contains("# Patched."), tree)
    };
    fs::write(&other, second).unwrap();
    world.patches = vec!["0001-change.patch", "0002-more.patch"];
    world.pin();
    world.setup();
    let (patched, both) = tree(&world);
    assert!(patched);

    world.patches.reverse();
    world.pin();
    world.setup();
    let (patched, reversed) = tree(&world);
    assert!(patched && reversed != both, "another order is another key");

    fs::remove_file(&other).unwrap();
    world.patches = vec!["0001-change.patch"];
    world.pin();
    world.run(&["setup", "--offline"]).exits(0);
    let (patched, one) = tree(&world);
    assert!(!patched && both.is_dir() && one != both, "nothing is un-applied in place");
}

/// Runs `cargo xtask ARGUMENTS` and then `after` in a mount namespace of its own where `mounts` was run first; `None`, and a
/// line that says so, where that is not allowed.
fn in_own_mounts(
    world: &World,
    test: &str,
    mounts: &str,
    after: &str,
    arguments: &[&str],
) -> Option<support::Run> {
    let script = format!(
        "store=$1; shift; {{ {mounts}; }} >/dev/null 2>&1 || exit 99\n\"$@\" && exit 0 || status=$?\n{after}\nexit $status"
    );
    let xtask = world.command(arguments);
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", &script, "sh"]).arg(world.path("store")).arg(xtask.get_program());
    command.args(xtask.get_args()).current_dir(world.path("work")).env_clear();
    command.envs(xtask.get_envs().filter_map(|(name, value)| Some((name, value?))));
    match command.output() {
        // 1 with these words is unshare's own; 99 is from above.
        Ok(output) if output.status.code() != Some(99) && !output.stderr.starts_with(b"unshare: ") => {
            Some(finished(output))
        }
        _ => {
            support::skipped(test, "this machine does not let a test mount anything (unshare -rm)");
            None
        }
    }
}

/// A store with room for 2 MiB.
const SMALL: &str = "mount -t tmpfs -o size=2m tmpfs \"$store\"";

/// A store that cannot be written.
const READ_ONLY: &str = "mount --bind \"$store\" \"$store\" && mount -o remount,ro,bind \"$store\"";

#[test]
fn c11_a_full_disk_is_named_and_leaves_no_entry() {
    let world = World::new();
    // More than the file system below has room for.
    fs::write(world.path("upstream/big"), vec![7; 3 << 20]).unwrap();
    world.pin();
    let upstream = world.path("upstream").display().to_string();
    fs::create_dir(world.path("store")).unwrap();
    let arguments = ["setup", "--offline", "--source", &upstream];
    let left = "find \"$store\" -mindepth 2 -not -path '*/locks/*'";
    let Some(run) = in_own_mounts(&world, "c11", SMALL, left, &arguments) else { return };
    let run = run.exits(1).says("error[KILN-0103]").says("hint: ").says("/store/");
    assert_eq!(run.stdout, "", "a part of an entry was left");
}

#[test]
fn c11_a_full_disk_does_not_throw_the_archive_away() {
    let world = World::new();
    fs::write(world.path("upstream/big"), vec![7; 3 << 20]).unwrap();
    let server = Server::new(vec![good(&world)]);
    point_to(&world, &server);
    fs::create_dir(world.path("store")).unwrap();
    let Some(run) = in_own_mounts(&world, "c11", SMALL, "ls \"$store/downloads\"", &["setup"]) else {
        return;
    };
    let run = run.exits(1).says("error[KILN-0103]");
    assert_eq!(run.stdout, format!("{REVISION}.tar.gz\n"), "{}", run.stderr);
}

#[test]
fn c12_a_read_only_mount_serves_doctor_build_and_a_setup_that_has_nothing_to_do() {
    let world = World::new();
    world.setup();
    for arguments in [&["doctor"][..], &["build", "--arch", "sm_86"], &["setup"]] {
        let Some(run) = in_own_mounts(&world, "c12", READ_ONLY, "", arguments) else { return };
        run.exits(0);
    }
    // And one that would have to write names the place.
    fs::write(world.backend(), "tampered").unwrap();
    let Some(run) = in_own_mounts(&world, "c12", READ_ONLY, "", &["setup"]) else { return };
    run.exits(1).says("error[KILN-0104]").says("/store/").says("hint: ");
}

#[test]
fn e4_tmpdir_on_another_file_system_or_missing_does_not_matter() {
    for tmpdir in ["/dev/shm", "/no/such/folder"] {
        let mut world = World::new();
        world.variables.push(("TMPDIR".to_owned(), tmpdir.to_owned()));
        world.setup();
        world.run(&["build", "--arch", "sm_86"]).exits(0);
    }
    // And the store on a file system of its own.
    if fs::metadata("/dev/shm").is_err() {
        support::skipped("e4", "there is no /dev/shm");
        return;
    }
    let world = World::new();
    let store = tempfile::tempdir_in("/dev/shm").unwrap();
    let upstream = world.path("upstream").display().to_string();
    let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
    command.env("KILN_STORE", store.path());
    finished(command.output().unwrap()).exits(0);
}

#[test]
fn g6_setup_goes_on_without_network_from_what_the_store_has() {
    let world = World::new();
    let server = Server::new(vec![good(&world)]);
    point_to(&world, &server);
    world.run(&["setup"]).exits(0);
    for folder in ["pristine", "sources", "backends"] {
        fs::remove_dir_all(world.path("store").join(folder)).unwrap();
    }
    let mut command = world.command(&["setup", "--offline"]);
    command.env("CARGO_NET_OFFLINE", "true");
    finished(command.output().unwrap()).exits(0);
    assert_eq!(server.asked().len(), 1);
}
