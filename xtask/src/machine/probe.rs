//! Starting a tool to ask it something, in the environment that the real call gets, and explaining why a tool
//! cannot run.
//!
//! A path is run as given, never replaced by its real path: it may be a wrapper script or a dispatcher that looks
//! at its own name.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::fs::Access;

use crate::base::env::Env;
use crate::base::process::{self, Failure, Output};
use crate::report::error::{Error, Result};

crate::codes! {
    TOOL_MISSING = "KILN-0301", Machine, "a tool's path leads to nothing",
        "The path of a tool names nothing, or a link whose target is gone. A path from a variable is used \
         exactly as it stands: it is not looked up on PATH, `~` is not expanded and white space is not \
         trimmed. Set it to the absolute path of the tool, or unset it.";
    TOOL_NOT_A_PROGRAM = "KILN-0302", Machine, "a tool's path is not a program",
        "The path of a tool names a folder, or a file without execute permission, or a file that the system cannot \
         execute (a program for another machine, or a script whose first line does not name an interpreter).";
    TOOL_CANNOT_RUN = "KILN-0303", Machine, "a tool was found but does not run",
        "The file is there and could not do its work: its interpreter or a shared library is missing, the \
         dynamic loader refused it, or it ended with an error. `LD_LIBRARY_PATH` is shown because it decides \
         which libraries the loader takes. Copying a program out of its toolchain breaks it in the same way, \
         since it looks for libraries beside itself. Name another tool, or install what the loader misses.";
    TOOL_HANGS = "KILN-0304", Machine, "a tool did not answer in time",
        "The tool was still running after the time limit and was ended. A wrapper that waits for input, or a file \
         on a network mount that does not answer, does this.";
}

/// Runs `program` with `arguments` in the environment of the real call.
///
/// # Errors
/// It is missing, cannot be executed, takes longer than `limit`, or ends with another status than 0; the message
/// says which, with the loader's or the tool's own words.
pub fn run(program: &Path, arguments: &[&str], env: &Env, limit: Duration) -> Result<Output> {
    let mut tries = 0;
    let output = loop {
        match process::output(command(program, env).args(arguments), limit) {
            // Somebody is still writing the file, or was when another thread of ours forked: over in a moment.
            Err(Failure::Start(error)) if error.kind() == io::ErrorKind::ExecutableFileBusy && tries < 20 => {
                tries += 1;
                thread::sleep(Duration::from_millis(5));
            }
            Err(Failure::Start(error)) => return Err(hinted(cannot_start(program, &error))),
            Err(Failure::TimedOut(limit)) => {
                return Err(Error::new(
                    &TOOL_HANGS,
                    format!("{} gave no answer within {} s", program.display(), limit.as_secs_f32()),
                )
                .hint("run it by hand; if it is a wrapper that waits, name the real tool instead"));
            }
            Ok(output) => break output,
        }
    };
    if output.status.success() { Ok(output) } else { Err(hinted(failed(program, &output, env))) }
}

fn hinted(error: Error) -> Error {
    if error.hint_text().is_some() { error } else { error.hint("name a working one, by its absolute path") }
}

/// A command for `program` that gets the injected environment, with [`child_library_path`] as its loader path.
pub fn command(program: &Path, env: &Env) -> Command {
    let mut command = Command::new(program);
    command.env_clear().envs(env.vars()).env_remove("LD_LIBRARY_PATH");
    if let Some(path) = child_library_path(env) {
        command.env("LD_LIBRARY_PATH", path);
    }
    command
}

/// The `LD_LIBRARY_PATH` that tools get: the user's own folders, without those that `cargo run` puts in front
/// and without empty elements, which the loader takes as the working folder.
pub fn child_library_path(env: &Env) -> Option<OsString> {
    let value = env.var("LD_LIBRARY_PATH")?;
    let kept: Vec<PathBuf> = std::env::split_paths(value)
        .filter(|folder| !folder.as_os_str().is_empty() && !is_from_cargo_run(folder))
        .collect();
    if kept.is_empty() { None } else { std::env::join_paths(kept).ok() }
}

/// The file behind `path`, links followed; `path` itself when that fails.
pub fn realpath(path: &Path) -> PathBuf {
    fs_err::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Says whether `path` is something in its folder, be it a dangling link.
pub fn is_there(path: &Path) -> bool {
    fs_err::symlink_metadata(path).is_ok()
}

/// A path that a variable or a flag names, made absolute, and checked to be a file that can be executed.
///
/// `name` is the tool's usual name, to suggest a file inside a folder; `from` says where the value came from.
///
/// # Errors
/// Nothing is there, or it is not an executable file; the message says what was probably meant.
pub fn explicit(value: &OsStr, from: &str, name: &str, env: &Env) -> Result<PathBuf> {
    let given = Path::new(value);
    // Rebuilt from its components to drop each `.`; `..` stays, since links may be in the way.
    let path: PathBuf = env.absolute(given)?.components().collect();
    let told = |code, what: String| Error::new(code, format!("{from} is {value:?}: {what}"));
    let metadata = match fs_err::metadata(&path) {
        Ok(metadata) => metadata,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Err(missing(given, &path, from, env, told));
        }
        Err(error) => return Err(Error::from(error).context(format!("{from} is {value:?}"))),
    };
    if metadata.is_dir() {
        let inside = [path.join(name), path.join("bin").join(name)].into_iter().find(|file| file.is_file());
        let meant = inside.unwrap_or_else(|| path.join(name));
        return Err(told(
            &TOOL_NOT_A_PROGRAM,
            format!("{} is a directory, did you mean {}?", path.display(), meant.display()),
        )
        .hint(format!("set {from} to {}", meant.display())));
    }
    if rustix::fs::access(&path, Access::EXEC_OK).is_err() {
        return Err(told(&TOOL_NOT_A_PROGRAM, format!("{} is not executable", path.display()))
            .hint(format!("chmod +x {}", path.display())));
    }
    Ok(path)
}

fn missing(
    given: &Path,
    path: &Path,
    from: &str,
    env: &Env,
    told: impl Fn(&'static crate::report::error::Code, String) -> Error,
) -> Error {
    if let Ok(target) = fs_err::read_link(path) {
        return told(
            &TOOL_MISSING,
            format!("{} is a link to {}, which does not exist", path.display(), target.display()),
        )
        .hint(format!("name an existing file in {from}, or unset it"));
    }
    let text = given.as_os_str().as_bytes();
    if text.starts_with(b"~") {
        let error = told(&TOOL_MISSING, "`~` is only expanded by a shell, and not inside quotes".into());
        let rest = text.strip_prefix(b"~/").map(OsStr::from_bytes);
        return match (rest, env.path("HOME")) {
            (Some(rest), Ok(Some(home))) => {
                error.hint(format!("set {from} to {}", home.join(rest).display()))
            }
            _ => error.hint(format!("name the absolute path in {from}")),
        };
    }
    let trimmed = text.trim_ascii();
    if trimmed.len() != text.len() {
        let meant = Path::new(OsStr::from_bytes(trimmed));
        return told(&TOOL_MISSING, "it begins or ends with white space, which is part of the path".into())
            .hint(format!("set {from} to {} without the white space", meant.display()));
    }
    let error = told(&TOOL_MISSING, format!("{} does not exist", path.display()));
    let bare = !process::is_path(given.as_os_str());
    let on_path = env.search_path().into_iter().map(|folder| folder.join(given)).find(|file| file.is_file());
    match on_path {
        Some(found) if bare => {
            error.hint(format!("{from} is not looked up on PATH; set it to {}", found.display()))
        }
        _ => error.hint(format!("name an existing file in {from}, or unset it")),
    }
}

fn cannot_start(program: &Path, error: &io::Error) -> Error {
    let shown = program.display();
    match error.kind() {
        io::ErrorKind::NotFound if program.exists() => {
            let interpreter = match shebang(program) {
                Some(interpreter) => {
                    format!("the interpreter that its first line names, {interpreter}, does not")
                }
                None => "the dynamic loader that it asks for does not".to_owned(),
            };
            Error::new(&TOOL_CANNOT_RUN, format!("{shown} exists, but {interpreter}"))
                .hint("name a tool that is built for this system, by its absolute path")
        }
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => match fs_err::read_link(program) {
            Ok(target) => Error::new(
                &TOOL_MISSING,
                format!("{shown} is a link to {}, which does not exist", target.display()),
            ),
            Err(_) => Error::new(&TOOL_MISSING, format!("{shown} does not exist")),
        },
        io::ErrorKind::PermissionDenied if program.is_dir() => {
            Error::new(&TOOL_NOT_A_PROGRAM, format!("{shown} is a directory"))
        }
        io::ErrorKind::PermissionDenied => Error::new(
            &TOOL_NOT_A_PROGRAM,
            format!("{shown} is not executable, or its file system forbids programs (noexec)"),
        )
        .hint(format!("chmod +x {shown}")),
        _ if error.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) => {
            let what = if starts_with(program, b"\x7fELF") {
                "it is a program for another kind of machine"
            } else {
                "it is neither a program nor a script whose first line starts with #!"
            };
            Error::new(&TOOL_NOT_A_PROGRAM, format!("{shown} cannot be executed: {what} (exec format error)"))
                .hint("name the real tool by its absolute path, or add a #! line to the wrapper")
        }
        _ => Error::new(&TOOL_CANNOT_RUN, format!("{shown} could not be started: {error}")),
    }
}

fn failed(program: &Path, output: &Output, env: &Env) -> Error {
    let said = first_line(&output.stderr).or_else(|| first_line(&output.stdout));
    let said = said.unwrap_or("it printed nothing");
    let about_loading = output.status.code() == Some(127)
        || ["shared librar", "symbol lookup error", "dynamically linked", "Library not loaded"]
            .iter()
            .any(|words| output.stderr.contains(words));
    let what = if about_loading { "found but not runnable" } else { "ended with an error" };
    let error =
        Error::new(&TOOL_CANNOT_RUN, format!("{}: {what} ({}): {said}", program.display(), output.status));
    if !about_loading {
        return error;
    }
    let library_path = match child_library_path(env) {
        Some(path) => format!("LD_LIBRARY_PATH was {path:?}"),
        None => "LD_LIBRARY_PATH was not set".to_owned(),
    };
    error.cause(library_path).hint(
        "install the tool again with its libraries, unset LD_LIBRARY_PATH, or name another one by its absolute path",
    )
}

/// The first line of `text` that holds something, without white space around it.
pub fn first_line(text: &str) -> Option<&str> {
    text.lines().map(str::trim).find(|line| !line.is_empty())
}

fn shebang(program: &Path) -> Option<String> {
    let bytes = head(program)?;
    let line = bytes.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let interpreter = line.trim_ascii().split(u8::is_ascii_whitespace).next()?;
    Some(String::from_utf8_lossy(interpreter).into_owned())
}

fn starts_with(program: &Path, magic: &[u8]) -> bool {
    head(program).is_some_and(|bytes| bytes.starts_with(magic))
}

fn head(program: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(fs_err::File::open(program).ok()?, 256), &mut bytes).ok()?;
    Some(bytes)
}

fn is_from_cargo_run(folder: &Path) -> bool {
    let names: Vec<&OsStr> = folder
        .components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name),
            _ => None,
        })
        .collect();
    let from_end =
        |n: usize| names.len().checked_sub(n + 1).map_or("", |at| names[at].to_str().unwrap_or(""));
    // target[/triple]/profile[/deps], by name for the built-in profiles and by Cargo's own bookkeeping for others.
    let deps = usize::from(from_end(0) == "deps");
    let profile = if deps == 1 { folder.parent().unwrap_or(folder) } else { folder };
    let named = matches!(from_end(deps), "debug" | "release")
        && (from_end(deps + 1) == "target" || from_end(deps + 2) == "target");
    // A toolchain's own libraries.
    let rustlib = from_end(0) == "lib" && from_end(2) == "rustlib";
    let sysroot = from_end(0) == "lib" && (from_end(2) == "toolchains" || folder.join("rustlib").is_dir());
    named || profile.join(".fingerprint").is_dir() || rustlib || sysroot
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Writes an executable `/bin/sh` script and returns its path.
    pub(crate) fn script(folder: &Path, name: &str, body: &str) -> PathBuf {
        executable(folder, name, &format!("#!/bin/sh\n{body}\n"))
    }

    /// Writes an executable file as it stands and returns its path.
    pub(crate) fn executable(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, text).unwrap();
        fs_err::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    }

    const LIMIT: Duration = process::PROBE_LIMIT;

    fn empty() -> Env {
        Env::of::<&str, &str>([], "/")
    }

    #[test]
    fn a7_loader_sentence_and_path_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let llc = script(
            folder.path(),
            "llc",
            "echo 'llc: error while loading shared libraries: libLLVM.so.22.1: cannot open shared object file' >&2; exit 127",
        );
        let error = run(&llc, &["--version"], &empty(), LIMIT).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "{}: found but not runnable (exit status: 127): llc: error while loading shared libraries: \
                 libLLVM.so.22.1: cannot open shared object file\n  caused by: LD_LIBRARY_PATH was not set",
                llc.display()
            )
        );
        assert_eq!(error.code().id, "KILN-0303");
    }

    #[test]
    fn a8_nixos_stub_loader_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let llc = script(
            folder.path(),
            "llc",
            "echo 'Could not start dynamically linked executable: llc' >&2; exit 127",
        );
        let error = run(&llc, &[], &empty(), LIMIT).unwrap_err();
        assert!(error.message().contains("found but not runnable"), "{error}");
        assert!(error.message().contains("Could not start dynamically linked executable"), "{error}");
    }

    #[test]
    fn a8_missing_interpreter_is_told_from_a_missing_file() {
        let folder = tempfile::tempdir().unwrap();
        let llc = executable(folder.path(), "llc", "#!/no/such/sh -x\n");
        let error = run(&llc, &[], &empty(), LIMIT).unwrap_err();
        assert_eq!(
            error.message(),
            format!(
                "{} exists, but the interpreter that its first line names, /no/such/sh, does not",
                llc.display()
            )
        );
        let error = run(&folder.path().join("none"), &[], &empty(), LIMIT).unwrap_err();
        assert_eq!(error.message(), format!("{} does not exist", folder.path().join("none").display()));
    }

    #[test]
    fn a9_symbol_lookup_errors_show_the_library_path() {
        let folder = tempfile::tempdir().unwrap();
        let llc = script(
            folder.path(),
            "llc",
            "[ -z \"${LD_LIBRARY_PATH+set}\" ] && exit 0\necho 'llc: symbol lookup error: undefined symbol: x, version LLVM_19.1' >&2; exit 127",
        );
        let env = Env::of([("LD_LIBRARY_PATH", "/opt/rocm/lib")], "/");
        let error = run(&llc, &[], &env, LIMIT).unwrap_err();
        assert_eq!(error.causes(), ["LD_LIBRARY_PATH was \"/opt/rocm/lib\""]);
        // Set to nothing, or only to what `cargo run` adds: as if it were not set.
        for value in ["", ":", "/w/target/debug/deps:/w/target/debug", "/home/u/.rustup/toolchains/t/lib:"] {
            run(&llc, &[], &Env::of([("LD_LIBRARY_PATH", value)], "/"), LIMIT).unwrap();
        }
    }

    #[test]
    fn a9_b19_library_path_has_no_empty_element_and_nothing_from_cargo() {
        let folder = tempfile::tempdir().unwrap();
        let custom = folder.path().join("out/kiln-profile");
        fs_err::create_dir_all(custom.join(".fingerprint")).unwrap();
        let sysroot = folder.path().join("sysroot");
        fs_err::create_dir_all(sysroot.join("lib/rustlib/x86_64-unknown-linux-gnu/lib")).unwrap();
        let value = format!(
            "/a::/w/target/debug/deps:/w/target/x86_64-unknown-linux-gnu/release:/opt/target/lib:{0}:{0}/deps:{1}/lib:{1}/lib/rustlib/x86_64-unknown-linux-gnu/lib:/b/lib:",
            custom.display(),
            sysroot.display()
        );
        let env = Env::of([("LD_LIBRARY_PATH", value)], "/");
        assert_eq!(child_library_path(&env).unwrap(), "/a:/opt/target/lib:/b/lib");
    }

    #[test]
    fn a15_a_script_without_interpreter_line_is_an_exec_format_error() {
        let folder = tempfile::tempdir().unwrap();
        let llc = executable(folder.path(), "llc", "echo hello\n");
        let error = run(&llc, &[], &empty(), LIMIT).unwrap_err();
        assert!(error.message().ends_with(
            "it is neither a program nor a script whose first line starts with #! (exec format error)"
        ));
        let elf = executable(folder.path(), "elf", "\x7fELF\x02\x01\x01 not really");
        let error = run(&elf, &[], &empty(), LIMIT).unwrap_err();
        assert!(error.message().contains("a program for another kind of machine"), "{error}");
    }

    #[test]
    fn a15_a_wrapper_that_never_exits_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let llc = script(folder.path(), "llc", "while :; do read line < /dev/zero; done");
        let error = run(&llc, &[], &empty(), Duration::from_millis(60)).unwrap_err();
        assert_eq!(error.code().id, "KILN-0304");
    }

    #[test]
    fn a10_misused_variables_are_explained() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        script(folder.path(), "dir/llc", ":");
        script(folder.path(), "prefix/bin/llc", ":");
        fs_err::create_dir_all(folder.path().join("void")).unwrap();
        script(folder.path(), "a b/llc", ":");
        fs_err::write(folder.path().join("plain"), "").unwrap();
        fs_err::os::unix::fs::symlink("gone", folder.path().join("dangling")).unwrap();
        let env = Env::of([("HOME", at("home")), ("PATH", at("dir"))], folder.path());
        let message = |value: &str| {
            let error = explicit(OsStr::new(value), "CUDA_OXIDE_LLC", "llc", &env).unwrap_err();
            let text = format!("{}; {}", error.message(), error.hint_text().unwrap());
            text.replace(&folder.path().display().to_string(), "/t")
        };
        assert_eq!(
            message("dir"),
            "CUDA_OXIDE_LLC is \"dir\": /t/dir is a directory, did you mean /t/dir/llc?; set CUDA_OXIDE_LLC to /t/dir/llc"
        );
        assert_eq!(
            message("prefix"),
            "CUDA_OXIDE_LLC is \"prefix\": /t/prefix is a directory, did you mean /t/prefix/bin/llc?; set CUDA_OXIDE_LLC to /t/prefix/bin/llc"
        );
        assert!(message("void").contains("did you mean /t/void/llc?"));
        assert_eq!(
            message("none"),
            "CUDA_OXIDE_LLC is \"none\": /t/none does not exist; name an existing file in CUDA_OXIDE_LLC, or unset it"
        );
        assert_eq!(
            message("llc"),
            "CUDA_OXIDE_LLC is \"llc\": /t/llc does not exist; CUDA_OXIDE_LLC is not looked up on PATH; set it to /t/dir/llc"
        );
        assert_eq!(
            message("plain"),
            "CUDA_OXIDE_LLC is \"plain\": /t/plain is not executable; chmod +x /t/plain"
        );
        assert_eq!(
            message("~/llc"),
            "CUDA_OXIDE_LLC is \"~/llc\": `~` is only expanded by a shell, and not inside quotes; set CUDA_OXIDE_LLC to /t/home/llc"
        );
        assert_eq!(
            message("dir/llc\n"),
            "CUDA_OXIDE_LLC is \"dir/llc\\n\": it begins or ends with white space, which is part of the path; set CUDA_OXIDE_LLC to dir/llc without the white space"
        );
        assert!(message("dir/llc ").contains("white space"));
        assert_eq!(
            message("dangling"),
            "CUDA_OXIDE_LLC is \"dangling\": /t/dangling is a link to gone, which does not exist; name an existing file in CUDA_OXIDE_LLC, or unset it"
        );
        let good = explicit(OsStr::new("./a b/llc"), "CUDA_OXIDE_LLC", "llc", &env).unwrap();
        assert!(good.is_absolute() && good.ends_with("a b/llc"), "{good:?}");
    }
}
