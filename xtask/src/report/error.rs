//! The one error type of the product: a stable code, what was found, and the command that mends it.
//!
//! Every module declares its codes with [`codes!`](crate::codes); [`crate::cmd::explain`] lists them all, so that an error, its
//! `explain` text and its documentation page come from the same source.

use std::fmt;
use std::io;

use serde::Serialize;

/// What a failure means for the caller of the program: the process exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The user or the machine must change something; there is a hint.
    Machine,
    /// A bug, or an input/output failure of ours.
    Internal,
    /// Something is there and is not what PROVENANCE says.
    Refusal,
    /// The child is the point of the verb: its own status.
    Child(u8),
}

impl Exit {
    /// The process exit status.
    pub fn status(self) -> u8 {
        match self {
            Exit::Machine => 1,
            Exit::Internal => 2,
            Exit::Refusal => 70,
            Exit::Child(status) => status,
        }
    }
}

/// A kind of failure, known by a stable identifier such as `KILN-0301`.
#[derive(Debug, PartialEq, Eq)]
pub struct Code {
    /// The stable identifier.
    pub id: &'static str,
    /// What it means for the exit status.
    pub exit: Exit,
    /// One line, without a trailing period.
    pub title: &'static str,
    /// Why this is an error and how to mend it, a paragraph or two.
    pub explanation: &'static str,
}

/// Declares the error codes of a module, and `CODES`, the list of them.
///
/// ```ignore
/// codes! {
///     NOT_UTF8 = "KILN-0199", Machine, "file is not UTF-8", "The file ...";
/// }
/// ```
#[macro_export]
macro_rules! codes {
    ($($name:ident = $id:literal, $exit:ident, $title:literal, $explanation:literal;)+) => {
        $(
            #[doc = concat!("`", $id, "`: ", $title)]
            pub static $name: $crate::report::error::Code = $crate::report::error::Code {
                id: $id,
                exit: $crate::report::error::Exit::$exit,
                title: $title,
                explanation: $explanation,
            };
        )+
        /// The error codes that this module declares.
        pub static CODES: &[&$crate::report::error::Code] = &[$(&$name),+];
    };
}

codes! {
    IO = "KILN-0101", Internal, "an input or output operation failed",
        "Reading or writing a file failed for a reason that is not a missing permission or a full disk. The \
         message names the path and the system's reason. Check the path and its file system, and run the \
         command again.";
    ACCESS = "KILN-0102", Machine, "no permission for a file or folder",
        "The named path cannot be read or written by this user. `doctor` and `build` need only read access to a \
         store that `setup` has filled; `setup` needs write access. Choose another store with `--store DIR`, or \
         mend the permissions.";
    NO_SPACE = "KILN-0103", Machine, "the disk is full",
        "Writing the named path failed because its file system has no room. Nothing half-written was published. \
         Free some room, or choose a store on another disk with `--store DIR`.";
    READ_ONLY = "KILN-0104", Machine, "the file system is read-only",
        "The named path is on a read-only file system. `doctor` and `build` work on a read-only store once \
         `setup` has filled it; to fill it, choose a writable one with `--store DIR`.";
    BUG = "KILN-0199", Internal, "an internal inconsistency",
        "Something that should be impossible happened. Please report it with the command and its output.";
}

/// The result of everything that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure: its [`Code`], what was found and expected and where, the causes, and the command that mends it.
#[derive(Debug)]
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    code: &'static Code,
    exit: Exit,
    message: String,
    causes: Vec<String>,
    hint: Option<String>,
}

impl Error {
    /// A failure of kind `code`; `message` says what was found, what was expected, and where, without a
    /// trailing period.
    pub fn new(code: &'static Code, message: impl Into<String>) -> Self {
        let exit = code.exit;
        Error(Box::new(Inner { code, exit, message: message.into(), causes: Vec::new(), hint: None }))
    }

    /// Adds the command or change that mends it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Adds an underlying cause, printed below the message.
    #[must_use]
    pub fn cause(mut self, cause: impl fmt::Display) -> Self {
        self.0.causes.push(cause.to_string());
        self
    }

    /// Puts `message` in front: the present message becomes the first cause.
    #[must_use]
    pub fn context(mut self, message: impl Into<String>) -> Self {
        let inner = std::mem::replace(&mut self.0.message, message.into());
        self.0.causes.insert(0, inner);
        self
    }

    /// Overrides the exit status: the child is the point of the verb.
    #[must_use]
    pub fn with_exit(mut self, exit: Exit) -> Self {
        self.0.exit = exit;
        self
    }

    /// Of an entry of the store that cannot be read: that it is damaged, with this error as the cause. Only a missing
    /// permission says nothing about the entry and stays what it is.
    #[must_use]
    pub fn as_damage(self, code: &'static Code, what: &std::path::Path) -> Self {
        if std::ptr::eq(self.code(), &ACCESS) {
            return self;
        }
        Error::new(code, format!("{} is not what setup published", what.display()))
            .cause(self)
            .hint("run: cargo xtask setup")
    }

    /// The kind of failure.
    pub fn code(&self) -> &'static Code {
        self.0.code
    }

    /// What the process must exit with.
    pub fn exit(&self) -> Exit {
        self.0.exit
    }

    /// The message alone, one or more lines.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Underlying causes, outermost first.
    pub fn causes(&self) -> &[String] {
        &self.0.causes
    }

    /// The command or change that mends it.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }
}

/// An error as the document that `--json` prints on standard output; described in docs/reference.md.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    schema: &'static str,
    ok: bool,
    exit: u8,
    code: &'static str,
    title: &'static str,
    message: &'a str,
    causes: &'a [String],
    hint: Option<&'a str>,
}

impl<'a> From<&'a Error> for Report<'a> {
    fn from(error: &'a Error) -> Self {
        Report {
            schema: "kiln.error/1",
            ok: false,
            exit: error.exit().status(),
            code: error.code().id,
            title: error.code().title,
            message: error.message(),
            causes: error.causes(),
            hint: error.hint_text(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.message)?;
        for cause in &self.0.causes {
            write!(f, "\n  caused by: {cause}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        let code = match error.kind() {
            io::ErrorKind::PermissionDenied => &ACCESS,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => &NO_SPACE,
            io::ErrorKind::ReadOnlyFilesystem => &READ_ONLY,
            _ => &IO,
        };
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied => {
                "mend its permissions or owner, or choose another store with --store DIR"
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "free some room there, or choose a store on another disk with --store DIR"
            }
            io::ErrorKind::ReadOnlyFilesystem => "choose a writable store with --store DIR",
            _ => return Error::new(code, error.to_string()),
        };
        Error::new(code, error.to_string()).hint(hint)
    }
}
