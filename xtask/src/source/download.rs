//! Downloading one file over HTTPS, so that only a whole and plausible body ever has the final name.
//!
//! The body goes into `NAME.part` beside the target and is renamed when it is complete; a killed download
//! leaves only that, and the next one goes on where it ended if the server says that the file is the same (a
//! strong ETag). Passing failures are retried a few times with growing pauses, and `Retry-After` is honoured.
//! Proxies come from the usual variables, certificates from the system.
//!
//! Not here: whether to download at all, locking (one writer per target), and whether the content is the
//! right one.

use std::fmt::Write as _;
use std::io::{self, Read, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use reqwest::blocking::{Client, Response};
use reqwest::header::{self, HeaderMap, HeaderName};
use reqwest::{StatusCode, Url, redirect};

use crate::report::error::{Error, Result};
use crate::report::progress::Progress;

crate::codes! {
    BAD_ADDRESS = "KILN-0641", Machine, "not an address to download from",
        "Sources are downloaded over https, so that nobody on the way can change or watch the request. Plain \
         http is accepted from this machine only. Mend the repository in PROVENANCE, or give a local archive \
         with `--source`.";
    UNREACHABLE = "KILN-0642", Machine, "the server cannot be reached",
        "There was no answer: no network, a name that does not resolve, a firewall, a proxy, or a \
         certificate that the system does not trust. HTTPS_PROXY and NO_PROXY are honoured, SSL_CERT_FILE \
         names another set of certificates. Without a network give the archive with `--source`.";
    STATUS = "KILN-0643", Machine, "the server did not give the file",
        "The server answered with a status other than success, which the message shows with the start of the \
         answer. 404 means that the repository or the revision is not there, 401 and 403 that it is not \
         public, 429 that too many requests came from this address. A local archive can be given with \
         `--source`. Check `repository` and `revision` in PROVENANCE.";
    NOT_THE_FILE = "KILN-0644", Machine, "the server gave something else than the file",
        "The answer was a success, yet its body is no archive: an HTML page usually comes from a proxy or a \
         log-in page of the network. Nothing was kept. Open the address in a browser to see it, or give a \
         local archive with `--source`.";
    CUT_OFF = "KILN-0645", Machine, "the download was cut off",
        "The connection ended or went silent before the whole body came, several times in a row. What came \
         is kept beside the target; running the command again goes on from there if the server can do \
         that.";
    TOO_LARGE = "KILN-0646", Machine, "the download is larger than the file can be",
        "The body is far larger than the pinned source, so it was stopped before it filled the disk. Check \
         the address in PROVENANCE.";
    CLIENT = "KILN-0647", Machine, "the HTTP client cannot be set up",
        "The system's certificates or proxy variables cannot be used. The message names the reason; check \
         HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE.";
}

/// What to download, and how patiently.
#[derive(Clone, Debug)]
pub struct Download {
    url: Url,
    /// What the body must look like.
    pub content: Content,
    /// Bytes of the body at most.
    pub most: u64,
    /// Attempts, the first one included.
    pub attempts: u32,
    /// Time for a connection to come about.
    pub connect: Duration,
    /// Time that may pass without a byte.
    pub stall: Duration,
}

/// What a body must look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A gzip file, by its first bytes.
    Gzip,
    /// Anything but an HTML page.
    Any,
}

impl Download {
    /// A gzip file of at most 512 MiB at `url`, in four attempts, with 20 s to connect and 30 s without a
    /// byte.
    ///
    /// # Errors
    /// [`BAD_ADDRESS`]: not https, and not http on this machine.
    pub fn new(url: &str) -> Result<Self> {
        let bad = |what: String| {
            Error::new(&BAD_ADDRESS, what)
                .hint("mend `repository` in PROVENANCE, or give a local archive with `--source`")
        };
        let parsed = Url::parse(url).map_err(|error| bad(format!("{url:?} is no URL: {error}")))?;
        if !is_allowed(&parsed) {
            return Err(bad(format!("{} is not https", shown(&parsed))));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() {
            return Err(bad(format!("{} has a user name or a password in it", shown(&parsed))));
        }
        Ok(Download {
            url: parsed,
            content: Content::Gzip,
            most: 512 << 20,
            attempts: 4,
            connect: Duration::from_secs(20),
            stall: Duration::from_secs(30),
        })
    }
}

/// How a download went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Downloaded {
    /// Bytes of the whole file.
    pub bytes: u64,
    /// Bytes that an earlier, broken attempt had left and that were not fetched again.
    pub resumed_at: u64,
    /// Attempts that this call needed.
    pub attempts: u32,
}

/// Time, so that tests need not wait.
pub trait Clock {
    /// The time of day.
    fn now(&self) -> SystemTime;
    /// Waits.
    fn sleep(&self, pause: Duration);
}

/// The real time.
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }

    fn sleep(&self, pause: Duration) {
        std::thread::sleep(pause);
    }
}

/// Downloads into the file `to`, replacing it; its folder is made if it is missing.
///
/// # Errors One of [`CODES`], with the status, the address and the start of the body where there was one, or
/// a failure to write. `to` is untouched then.
pub fn download(request: &Download, to: &Path, progress: &dyn Progress) -> Result<Downloaded> {
    download_by(request, to, progress, &SystemClock)
}

/// As [`download`], with another clock for the pauses between attempts and for dates in `Retry-After`.
///
/// # Errors
/// As [`download`].
pub fn download_by(
    request: &Download,
    to: &Path,
    progress: &dyn Progress,
    clock: &dyn Clock,
) -> Result<Downloaded> {
    if let Some(folder) = to.parent() {
        fs_err::create_dir_all(folder)?;
    }
    let transfer = Transfer { request, client: client(request)?, part: Part::beside(to), progress, clock };
    let mut attempts = 0;
    let fetched = loop {
        attempts += 1;
        let outcome = transfer.attempt();
        progress.finish();
        let (error, asked) = match outcome {
            Ok(fetched) => break fetched,
            Err(Failure::Final(error)) => return Err(error),
            Err(Failure::Passing(error, asked)) => (error, asked),
        };
        if attempts >= request.attempts {
            return Err(error.context(format!("gave up after {attempts} attempts")));
        }
        let pause = asked.unwrap_or_else(|| growing_pause(attempts));
        if pause > LONGEST_PAUSE {
            return Err(error.context(format!(
                "gave up, because the server asks to wait {} s, more than {} s",
                pause.as_secs(),
                LONGEST_PAUSE.as_secs()
            )));
        }
        progress.note(&format!("{}; trying again in {} s", error.message(), pause.as_secs()));
        clock.sleep(pause);
    };
    transfer.part.publish(to)?;
    Ok(Downloaded { bytes: fetched.bytes, resumed_at: fetched.resumed_at, attempts })
}

fn client(request: &Download) -> Result<Client> {
    let builder = Client::builder()
        .user_agent(concat!("kiln-xtask/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(request.connect)
        // Of the blocking client: for the answer to begin, and then for every read.
        .timeout(request.stall)
        .redirect(redirect::Policy::custom(follow));
    // A proxy cannot reach this machine by its loopback names.
    let builder = if is_loopback(&request.url) { builder.no_proxy() } else { builder };
    builder.build().map_err(|error| {
        Error::new(&CLIENT, "cannot set up the HTTP client")
            .cause(causes(&error.without_url()))
            .hint("check HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE, or give a local archive with `--source`")
    })
}

fn follow(attempt: redirect::Attempt<'_>) -> redirect::Action {
    let is_downgrade = attempt.previous().last().is_some_and(|last| last.scheme() == "https")
        && attempt.url().scheme() != "https";
    if attempt.previous().len() > MOST_REDIRECTS {
        attempt.error(format!("more than {MOST_REDIRECTS} redirects"))
    } else if is_downgrade || !is_allowed(attempt.url()) {
        let what = format!("a redirect to {}, which is not https", shown(attempt.url()));
        attempt.error(what)
    } else {
        attempt.follow()
    }
}

/// Why an attempt failed.
enum Failure {
    /// Trying again would give the same.
    Final(Error),
    /// Another attempt may succeed; the pause is what the server asked for.
    Passing(Error, Option<Duration>),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Final(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Final(error.into())
    }
}

struct Transfer<'a> {
    request: &'a Download,
    client: Client,
    part: Part,
    progress: &'a dyn Progress,
    clock: &'a dyn Clock,
}

struct Fetched {
    bytes: u64,
    resumed_at: u64,
}

impl Transfer<'_> {
    fn attempt(&self) -> Result<Fetched, Failure> {
        let left = self.part.left_from(&self.request.url)?;
        let mut get = self.client.get(self.request.url.clone()).header(header::ACCEPT_ENCODING, "identity");
        if let Some((length, etag)) = &left {
            get = get.header(header::RANGE, format!("bytes={length}-")).header(header::IF_RANGE, etag);
        }
        let mut response = get.send().map_err(|error| self.no_answer(error))?;
        let resumed_at = match (response.status(), &left) {
            (StatusCode::OK, _) => 0,
            (StatusCode::PARTIAL_CONTENT, Some((length, _)))
                if content_range(response.headers()).is_some_and(|(start, _)| start == *length) =>
            {
                *length
            }
            (StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE, Some(_)) => {
                // What was left is of no use; the next attempt starts from nothing.
                self.part.remove()?;
                let what = format!("{} cannot go on at the place that was asked for", answer(&response));
                return Err(Failure::Passing(self.fault(&STATUS, what), Some(Duration::ZERO)));
            }
            _ => return Err(self.refused(response)),
        };
        self.receive(&mut response, resumed_at)
    }

    fn no_answer(&self, error: reqwest::Error) -> Failure {
        let (is_redirect, is_timeout) = (error.is_redirect(), error.is_timeout());
        let cause = causes(&error.without_url());
        let what = format!("{} gave no answer", shown(&self.request.url));
        let fault = |what: String| {
            Error::new(&UNREACHABLE, what).cause(&cause).hint(
                "check the network, HTTPS_PROXY and the system's certificates, or give a local archive with \
                 `--source`",
            )
        };
        if is_redirect {
            return Failure::Final(fault(format!("{} redirects to nowhere", shown(&self.request.url))));
        }
        if is_timeout {
            return Failure::Passing(fault(format!("{what} in time")), None);
        }
        // An untrusted certificate stays one.
        if cause.contains("certificate") {
            Failure::Final(fault(what))
        } else {
            Failure::Passing(fault(what), None)
        }
    }

    /// An answer whose status is no success.
    fn refused(&self, mut response: Response) -> Failure {
        let status = response.status();
        let asked = retry_after(response.headers(), self.clock.now());
        let start = first_bytes(&mut response);
        let what = format!("{}, expected 200 OK{start}", answer(&response));
        let error = self.fault(&STATUS, what);
        let is_passing = status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED
            || matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY
            );
        if is_passing { Failure::Passing(error, asked) } else { Failure::Final(error) }
    }

    fn receive(&self, response: &mut Response, resumed_at: u64) -> Result<Fetched, Failure> {
        let answer = answer(response);
        let total = if resumed_at > 0 {
            content_range(response.headers()).and_then(|(_, total)| total)
        } else {
            text(response.headers(), header::CONTENT_LENGTH).and_then(|length| length.parse().ok())
        };
        if total.is_some_and(|total| total > self.request.most) {
            return Err(self.too_large(&answer).into());
        }
        let mut buffer = vec![0; 64 << 10];
        let mut filled = self
            .beginning(response, &mut buffer)
            .map_err(|error| self.cut_off(&answer, resumed_at, total, &error))?;
        if resumed_at == 0 {
            self.check_start(response.headers(), &answer, &buffer[..filled])?;
        }
        let etag = text(response.headers(), header::ETAG);
        let mut file = self.part.open(&self.request.url, etag, resumed_at)?;
        self.progress.start(total);
        self.progress.advance(resumed_at);
        let mut bytes = resumed_at;
        while filled > 0 {
            bytes += filled as u64;
            if bytes > self.request.most {
                self.part.remove()?;
                return Err(self.too_large(&answer).into());
            }
            file.write_all(&buffer[..filled])?;
            self.progress.advance(filled as u64);
            filled =
                read(response, &mut buffer).map_err(|error| self.cut_off(&answer, bytes, total, &error))?;
        }
        if total.is_some_and(|total| total != bytes) {
            return Err(self.cut_off(&answer, bytes, total, &io::ErrorKind::UnexpectedEof.into()));
        }
        file.sync_all()?;
        Ok(Fetched { bytes, resumed_at })
    }

    /// Reads enough of the body to know what it is.
    fn beginning(&self, response: &mut Response, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < SHOWN_BYTES {
            match read(response, &mut buffer[filled..])? {
                0 => break,
                read => filled += read,
            }
        }
        Ok(filled)
    }

    fn check_start(&self, headers: &HeaderMap, answer: &str, start: &[u8]) -> Result<()> {
        let kind = text(headers, header::CONTENT_TYPE).unwrap_or_default().to_ascii_lowercase();
        let trimmed = start.trim_ascii_start().to_ascii_lowercase();
        let found = if start.is_empty() {
            "an empty body"
        } else if kind.starts_with("text/html")
            || trimmed.starts_with(b"<!doctype html")
            || trimmed.starts_with(b"<html")
        {
            "an HTML page"
        } else if self.request.content == Content::Gzip && !start.starts_with(&[0x1f, 0x8b]) {
            "something that is no gzip file"
        } else {
            return Ok(());
        };
        let what = format!("{answer} with {found}, expected a file{}", starts(start));
        Err(self.fault(&NOT_THE_FILE, what))
    }

    fn cut_off(&self, answer: &str, bytes: u64, total: Option<u64>, error: &io::Error) -> Failure {
        let is_timeout = error
            .get_ref()
            .and_then(|error| error.downcast_ref::<reqwest::Error>())
            .is_some_and(reqwest::Error::is_timeout);
        let of = total.map(|total| format!(" of {total}")).unwrap_or_default();
        let how = if is_timeout {
            format!("went silent for {} s", self.request.stall.as_secs_f32())
        } else {
            "was cut off".into()
        };
        let error = Error::new(&CUT_OFF, format!("{answer}, then it {how} after {bytes}{of} bytes"))
            .cause(causes(error))
            .hint("run the command again, or give a local archive with `--source`");
        Failure::Passing(error, None)
    }

    fn too_large(&self, answer: &str) -> Error {
        self.fault(&TOO_LARGE, format!("{answer} with more than {} bytes", self.request.most))
    }

    fn fault(&self, code: &'static crate::report::error::Code, what: String) -> Error {
        Error::new(code, what).hint(
            "check `repository` and `revision` in PROVENANCE and the network, or give a local archive with \
             `--source`",
        )
    }
}

/// The unfinished file, and the note of what it is the beginning of.
struct Part {
    file: PathBuf,
    /// Two lines: the address and the ETag.
    note: PathBuf,
}

impl Part {
    fn beside(to: &Path) -> Self {
        let with = |suffix: &str| {
            let mut name = to.as_os_str().to_owned();
            name.push(suffix);
            PathBuf::from(name)
        };
        Part { file: with(".part"), note: with(".part.etag") }
    }

    /// How much an earlier attempt left, and the ETag that it had.
    fn left_from(&self, url: &Url) -> io::Result<Option<(u64, String)>> {
        let length = match fs_err::metadata(&self.file) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        // A note that cannot be read only costs the bytes that came already.
        let note = fs_err::read_to_string(&self.note).unwrap_or_default();
        let etag = note.split_once('\n').filter(|(of, _)| *of == url.as_str()).map(|(_, etag)| etag.trim());
        Ok(etag.filter(|_| length > 0).map(|etag| (length, etag.to_owned())))
    }

    /// Opens the file to go on at `length`, or from nothing.
    fn open(&self, url: &Url, etag: Option<&str>, length: u64) -> io::Result<fs_err::File> {
        if length == 0 {
            // First the old note goes: a note must never be about other bytes than those in the file.
            remove(&self.note)?;
            let file = fs_err::File::create(&self.file)?;
            if let Some(etag) = etag.filter(|etag| is_strong(etag)) {
                fs_err::write(&self.note, format!("{url}\n{etag}\n"))?;
            }
            return Ok(file);
        }
        fs_err::OpenOptions::new().append(true).open(&self.file)
    }

    fn remove(&self) -> io::Result<()> {
        remove(&self.note)?;
        remove(&self.file)
    }

    fn publish(&self, to: &Path) -> io::Result<()> {
        fs_err::rename(&self.file, to)?;
        remove(&self.note)?;
        // The rename is durable once the folder is written.
        let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty());
        fs_err::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs_err::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Weak tags promise the same meaning, not the same bytes.
fn is_strong(etag: &str) -> bool {
    etag.len() > 2 && etag.starts_with('"') && etag.ends_with('"')
}

fn read(response: &mut Response, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match response.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// The first byte and the length of the whole file, from `bytes FIRST-LAST/WHOLE`.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let range = text(headers, header::CONTENT_RANGE)?.strip_prefix("bytes ")?;
    let (span, whole) = range.split_once('/')?;
    let (first, _) = span.split_once('-')?;
    Some((first.trim().parse().ok()?, whole.trim().parse().ok()))
}

fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = text(headers, header::RETRY_AFTER)?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

fn growing_pause(attempts: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(3_u32.saturating_pow(attempts.saturating_sub(1))).min(LONGEST_PAUSE)
}

/// Who answered what.
fn answer(response: &Response) -> String {
    format!("{} answered {}", shown(response.url()), response.status())
}

/// The start of an answer that is only shown; a failure to read it matters to nobody.
fn first_bytes(response: &mut Response) -> String {
    let mut start = Vec::new();
    let _ = response.take(SHOWN_BYTES as u64).read_to_end(&mut start);
    starts(&start)
}

fn starts(body: &[u8]) -> String {
    if body.is_empty() {
        return String::new();
    }
    let start = &body[..body.len().min(SHOWN_BYTES)];
    format!("; the body starts {:?}", String::from_utf8_lossy(start))
}

/// The address without what may be secret.
fn shown(url: &Url) -> String {
    let mut url = url.clone();
    // These fail only for addresses that cannot have the part.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_query(None);
    url.to_string()
}

fn is_allowed(url: &Url) -> bool {
    match url.scheme() {
        "https" => url.has_host(),
        "http" => is_loopback(url),
        _ => false,
    }
}

fn is_loopback(url: &Url) -> bool {
    url.host_str().is_some_and(|host| {
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    })
}

/// An error and everything below it in one line; the outermost text alone rarely says what happened.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut inner = error.source();
    while let Some(error) = inner {
        let _ = write!(text, ": {error}");
        inner = error.source();
    }
    text
}

/// Before the second attempt; three times longer before each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longer than this nobody waits for one file; the user can come back.
const LONGEST_PAUSE: Duration = Duration::from_secs(120);
const MOST_REDIRECTS: usize = 5;
/// Bytes of an unexpected body in a message.
const SHOWN_BYTES: usize = 64;

#[cfg(test)]
mod tests;
