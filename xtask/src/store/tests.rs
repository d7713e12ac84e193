use super::durable::{list_up_to, sync_file_system};
use super::*;

fn store(root: &Path) -> Store {
    Store { root: root.to_owned(), from: "test", patience: None }
}

fn key(text: &str) -> Key {
    Key::builder("test", 1).field("text", text).finish()
}

#[test]
fn keys_differ_when_text_moves_between_fields() {
    let one = Key::builder("k", 1).field("a", "bc").finish();
    let two = Key::builder("k", 1).field("ab", "c").finish();
    assert_ne!(one, two);
    assert_eq!(one.to_string().len(), 32);
}

#[test]
fn g2_the_root_is_absolute_and_empty_counts_as_unset() {
    let env = |pairs: &[(&str, &str)]| Env::of(pairs.iter().copied(), "/elsewhere");
    let locate = |flag: Option<&str>, remembered: Option<&str>, env: &Env| {
        Store::locate(flag.map(Path::new), remembered.map(Path::new), Path::new("/w"), env)
            .map(|store| (store.root, store.from))
    };
    let home = ("HOME", "/h");
    assert_eq!(locate(Some("rel"), None, &env(&[home])).unwrap(), ("/w/rel".into(), "--store"));
    assert_eq!(locate(Some(""), None, &env(&[home])).unwrap(), ("/h/.cache/kiln".into(), "HOME"));
    let set = env(&[home, ("KILN_STORE", "x/y")]);
    assert_eq!(locate(None, Some("/last"), &set).unwrap(), ("/w/x/y".into(), "KILN_STORE"));
    let set = env(&[home, ("KILN_STORE", ""), ("XDG_CACHE_HOME", "relative")]);
    assert_eq!(locate(None, None, &set).unwrap(), ("/h/.cache/kiln".into(), "HOME"));
    let set = env(&[home, ("XDG_CACHE_HOME", "/c")]);
    assert_eq!(locate(None, None, &set).unwrap(), ("/c/kiln".into(), "XDG_CACHE_HOME"));
    let error = locate(None, None, &env(&[])).unwrap_err();
    assert_eq!(error.code().id, "KILN-0901");
    assert_eq!(error.hint_text(), Some("give one with --store DIR"));
}

#[test]
fn e3_an_incomplete_entry_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let entry = store.entry(Kind::Source, &key("a"));
    fs::create_dir_all(&entry).unwrap();
    fs::write(entry.join("half"), "x").unwrap();

    let staging = store.stage(Kind::Source, &key("a")).unwrap();
    fs::write(staging.path().join("done"), "1").unwrap();
    assert_eq!(staging.publish().unwrap(), entry);
    assert!(entry.join("done").is_file() && !entry.join("half").exists());
    assert_eq!(fs::read_dir(folder.path().join("sources")).unwrap().count(), 1, "staging was left behind");
}

#[test]
fn e3_a_file_in_the_way_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let entry = store.entry(Kind::Source, &key("a"));
    let staging = store.stage(Kind::Source, &key("a")).unwrap();
    fs::write(&entry, "a file").unwrap();
    let error = staging.publish().unwrap_err();
    assert_eq!(error.code().id, "KILN-0903");
    assert_eq!(fs::read_to_string(&entry).unwrap(), "a file");
}

#[test]
fn e8_a_dropped_staging_folder_leaves_nothing_and_a_killed_one_is_swept_by_the_next_of_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    drop(store.stage(Kind::Backend, &key("a")).unwrap());
    // What SIGKILL leaves.
    let killed = store.stage(Kind::Backend, &key("a")).unwrap().folder.keep();
    fs::write(killed.join("half"), "x").unwrap();
    let other = store.stage(Kind::Backend, &key("b")).unwrap();
    drop(store.stage(Kind::Backend, &key("a")).unwrap());
    assert!(!killed.exists() && other.path().exists(), "another key's staging may be in use");
}

#[test]
fn few_files_are_flushed_one_by_one_and_many_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    for (count, few) in [(FEW, true), (FEW + 1, false)] {
        let staging = store.stage(Kind::Source, &key("a")).unwrap();
        fs::create_dir(staging.path().join("inner")).unwrap();
        for file in 1..count {
            fs::write(staging.path().join(format!("inner/{file}")), "x").unwrap();
        }
        assert_eq!(list_up_to(staging.path(), FEW, &mut Vec::new()).unwrap(), few);
        sync_tree(staging.path()).unwrap();
        let entry = staging.publish().unwrap();
        assert_eq!(fs::read_dir(entry.join("inner")).unwrap().count(), count - 1);
    }
    assert_eq!(sync_file_system(folder.path()).unwrap(), cfg!(target_os = "linux"));
}

#[test]
fn e6_a_lock_file_alone_does_not_block() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    fs::create_dir_all(folder.path().join("locks")).unwrap();
    fs::write(folder.path().join("locks/x.lock"), "process 1 (since long ago)").unwrap();
    let told = std::cell::Cell::new(false);
    let _lock = store.lock("x", &|_| told.set(true)).unwrap();
    assert!(!told.get(), "a file left by a dead process is no lock");
}

#[test]
fn e1_a_held_lock_names_its_holder() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let first = store.lock("x", &|_| {}).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let second = store.clone();
        scope.spawn(move || {
            let _lock = second.lock("x", &|text| sender.send(text.to_owned()).unwrap()).unwrap();
        });
        let told = receiver.recv().unwrap();
        let pid = std::process::id();
        assert!(told.starts_with(&format!("waiting for process {pid} (since 2")), "{told}");
        drop(first);
    });
}

#[test]
fn utc_follows_the_calendar() {
    assert_eq!(utc(0), "1970-01-01T00:00:00");
    assert_eq!(utc(951_827_696), "2000-02-29T12:34:56");
    assert_eq!(utc(1_783_151_974), "2026-07-04T07:59:34");
}
