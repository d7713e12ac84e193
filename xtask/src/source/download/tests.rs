use std::io::BufRead as _;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::*;
use crate::report::progress::Silent;

/// What the server does with one connection.
enum Answer {
    /// Sends these bytes and closes.
    Send(Vec<u8>),
    /// Sends these bytes and keeps silent until the client goes.
    Stall(Vec<u8>),
}

/// A server that gives one prepared answer to each connection, and remembers what it was asked.
struct Server {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn new(answers: Vec<Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let heads = Arc::clone(&asked);
        std::thread::spawn(move || {
            for answer in answers {
                let Ok((mut stream, _)) = listener.accept() else { return };
                heads.lock().unwrap().push(head(&stream));
                // The client may be gone already.
                let _ = match answer {
                    Answer::Send(bytes) => stream.write_all(&bytes),
                    Answer::Stall(bytes) => {
                        stream.write_all(&bytes).and_then(|()| stream.read(&mut [0]).map(drop))
                    }
                };
            }
        });
        Server { port, asked }
    }

    fn request(&self) -> Download {
        Download { stall: Duration::from_secs(5), ..Download::new(&self.url()).unwrap() }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/archive.tar.gz", self.port)
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn head(stream: &TcpStream) -> String {
    let lines = io::BufReader::new(stream).lines().map_while(Result::ok);
    lines.take_while(|line| !line.is_empty()).map(|line| line.to_lowercase() + "\n").collect()
}

fn send(head: &str, body: &[u8]) -> Answer {
    Answer::Send(bytes(head, body))
}

/// An answer with this status line and headers, and the right length.
fn bytes(head: &str, body: &[u8]) -> Vec<u8> {
    let lines = format!("HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    [lines.as_bytes(), body].concat()
}

/// As [`bytes`], with only the first `length` bytes of the body.
fn cut(head: &str, body: &[u8], length: usize) -> Answer {
    let whole = bytes(head, body);
    Answer::Send(whole[..whole.len() - body.len() + length].to_vec())
}

/// Remembers the pauses and waits for none.
#[derive(Default)]
struct FakeClock(Mutex<Vec<u64>>);

impl Clock for FakeClock {
    fn now(&self) -> SystemTime {
        httpdate::parse_http_date("Tue, 01 Jan 2030 00:00:00 GMT").unwrap()
    }

    fn sleep(&self, pause: Duration) {
        self.0.lock().unwrap().push(pause.as_secs());
    }
}

impl FakeClock {
    fn pauses(&self) -> Vec<u64> {
        self.0.lock().unwrap().clone()
    }
}

struct Target {
    folder: tempfile::TempDir,
    clock: FakeClock,
}

impl Target {
    fn new() -> Self {
        Target { folder: tempfile::tempdir().unwrap(), clock: FakeClock::default() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("downloads/source.tar.gz")
    }

    fn get(&self, request: &Download) -> Result<Downloaded> {
        download_by(request, &self.path(), &Silent, &self.clock)
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = fs_err::read_dir(self.folder.path().join("downloads"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// The error, with the server's port left out; nothing may have the final name.
    #[track_caller]
    fn refused(&self, server: &Server, code: &crate::report::error::Code) -> String {
        let error = self.get(&server.request()).unwrap_err();
        assert_eq!(error.code().id, code.id, "{error}");
        assert!(error.hint_text().is_some());
        assert!(!self.path().exists());
        error.to_string().replace(&server.port.to_string(), "PORT")
    }
}

fn body() -> Vec<u8> {
    let mut body = vec![0x1f, 0x8b, 8, 0];
    body.extend((0..200_000).map(|i| (i % 251) as u8));
    body
}

const TAGGED: &str = "200 OK\r\nETag: \"one\"";

#[test]
fn a_file_comes_whole_and_nothing_else_is_left() {
    let (server, target) = (Server::new(vec![send("200 OK", &body())]), Target::new());
    let downloaded = target.get(&server.request()).unwrap();
    assert_eq!(downloaded, Downloaded { bytes: 200_004, resumed_at: 0, attempts: 1 });
    assert_eq!(fs_err::read(target.path()).unwrap(), body());
    assert_eq!(target.names(), ["source.tar.gz"]);
    let asked = server.asked();
    assert!(asked[0].starts_with("get /archive.tar.gz http/1.1\n"), "{asked:?}");
    assert!(!asked[0].contains("range"), "{asked:?}");
}

#[test]
fn a_body_of_unknown_length_is_read_to_its_end() {
    let chunked =
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n\x1f\x8b\x08\r\n2\r\nab\r\n0\r\n\r\n";
    let (server, target) = (Server::new(vec![Answer::Send(chunked.to_vec())]), Target::new());
    assert_eq!(target.get(&server.request()).unwrap().bytes, 5);
    assert_eq!(fs_err::read(target.path()).unwrap(), b"\x1f\x8b\x08ab");
}

#[test]
fn c8_a_missing_or_forbidden_file_is_named_and_not_tried_again() {
    for status in ["404 Not Found", "401 Unauthorized", "403 Forbidden"] {
        let (server, target) =
            (Server::new(vec![send(status, b"no such thing"), send("200 OK", &body())]), Target::new());
        assert_eq!(
            target.refused(&server, &STATUS),
            format!(
                "http://127.0.0.1:PORT/archive.tar.gz answered {status}, expected 200 OK; \
                 the body starts \"no such thing\""
            )
        );
        assert_eq!(server.asked().len(), 1);
        assert_eq!(target.clock.pauses(), [0; 0]);
        assert_eq!(target.names(), [""; 0]);
    }
}

#[test]
fn c8_bodies_that_are_not_the_file_are_named_and_not_kept() {
    let html = b"<!DOCTYPE html><html><body>Please log in</body></html>";
    let start = "http://127.0.0.1:PORT/archive.tar.gz answered 200 OK with";
    for (answer, expected) in [
        (
            send("200 OK\r\nContent-Type: text/html; charset=utf-8", html),
            format!(
                "{start} an HTML page, expected a file; \
                 the body starts \"<!DOCTYPE html><html><body>Please log in</body></html>\""
            ),
        ),
        (
            send("200 OK\r\nContent-Type: application/gzip", b"\n <HTML>x"),
            format!("{start} an HTML page, expected a file; the body starts \"\\n <HTML>x\""),
        ),
        (send("200 OK", b""), format!("{start} an empty body, expected a file")),
        (
            send("200 OK", b"PK\x03\x04\x1b[2J"),
            format!(
                "{start} something that is no gzip file, expected a file; \
                 the body starts \"PK\\u{{3}}\\u{{4}}\\u{{1b}}[2J\""
            ),
        ),
    ] {
        let (server, target) = (Server::new(vec![answer]), Target::new());
        assert_eq!(target.refused(&server, &NOT_THE_FILE), expected);
        assert_eq!(target.names(), [""; 0]);
    }
}

#[test]
fn c8_a_body_shorter_than_its_length_is_never_taken_for_the_file() {
    let answers = (0..4).map(|_| cut("200 OK", &body(), 1000)).collect();
    let (server, target) = (Server::new(answers), Target::new());
    let said = target.refused(&server, &CUT_OFF);
    let expected = "gave up after 4 attempts\n  caused by: http://127.0.0.1:PORT/archive.tar.gz answered 200 OK, \
                    then it was cut off after 1000 of 200004 bytes\n";
    assert!(said.starts_with(expected), "{said}");
    assert_eq!(target.names(), ["source.tar.gz.part"]);
}

#[test]
fn c9_passing_failures_are_retried_with_growing_pauses() {
    let answers = vec![
        send("500 Internal Server Error", b"oops"),
        Answer::Send(Vec::new()),
        send("503 Service Unavailable", b""),
        send("200 OK", &body()),
    ];
    let (server, target) = (Server::new(answers), Target::new());
    assert_eq!(target.get(&server.request()).unwrap().attempts, 4);
    assert_eq!(target.clock.pauses(), [1, 3, 9]);
    assert_eq!(fs_err::read(target.path()).unwrap(), body());
}

#[test]
fn c9_retry_after_is_honoured_in_seconds_and_as_a_date() {
    let answers = vec![
        send("429 Too Many Requests\r\nRetry-After: 7", b""),
        send("429 Too Many Requests\r\nRetry-After: Tue, 01 Jan 2030 00:00:20 GMT", b""),
        send("503 Service Unavailable\r\nRetry-After: Tue, 01 Jan 2019 00:00:00 GMT", b""),
        send("200 OK", &body()),
    ];
    let (server, target) = (Server::new(answers), Target::new());
    target.get(&server.request()).unwrap();
    assert_eq!(target.clock.pauses(), [7, 20, 0]);
}

#[test]
fn c9_a_server_that_always_refuses_ends_the_attempts() {
    let answers = (0..5).map(|_| send("429 Too Many Requests", b"slow down")).collect();
    let (server, target) = (Server::new(answers), Target::new());
    assert_eq!(
        target.refused(&server, &STATUS),
        "gave up after 4 attempts\n  caused by: http://127.0.0.1:PORT/archive.tar.gz answered \
         429 Too Many Requests, expected 200 OK; the body starts \"slow down\""
    );
    assert_eq!(server.asked().len(), 4);
    assert_eq!(target.clock.pauses(), [1, 3, 9]);
}

#[test]
fn c9_a_wait_of_an_hour_is_left_to_the_user() {
    let answers = vec![send("429 Too Many Requests\r\nRetry-After: 3600", b"")];
    let (server, target) = (Server::new(answers), Target::new());
    assert_eq!(
        target.refused(&server, &STATUS),
        "gave up, because the server asks to wait 3600 s, more than 120 s\n  caused by: \
         http://127.0.0.1:PORT/archive.tar.gz answered 429 Too Many Requests, expected 200 OK"
    );
    assert_eq!(target.clock.pauses(), [0; 0]);
}

#[test]
fn c10_a_broken_download_goes_on_where_it_ended() {
    let rest = "206 Partial Content\r\nETag: \"one\"\r\nContent-Range: bytes 1000-200003/200004";
    let server = Server::new(vec![cut(TAGGED, &body(), 1000), send(rest, &body()[1000..])]);
    let target = Target::new();
    let once = Download { attempts: 1, ..server.request() };
    target.get(&once).unwrap_err();
    assert!(!target.path().exists());
    assert_eq!(target.names(), ["source.tar.gz.part", "source.tar.gz.part.etag"]);
    // As after a kill: another run finds what is there.
    let downloaded = target.get(&once).unwrap();
    assert_eq!(downloaded, Downloaded { bytes: 200_004, resumed_at: 1000, attempts: 1 });
    assert_eq!(fs_err::read(target.path()).unwrap(), body());
    assert_eq!(target.names(), ["source.tar.gz"]);
    let asked = server.asked();
    assert!(
        asked[1].contains("range: bytes=1000-\n") && asked[1].contains("if-range: \"one\"\n"),
        "{asked:?}"
    );
}

/// Downloads what the environment says; run by other tests in a process of its own.
#[test]
#[ignore = "is started by other tests"]
fn helper_downloads_in_a_process_of_its_own() {
    let [url, to] = ["KILN_TEST_URL", "KILN_TEST_TO"].map(|name| std::env::var(name).unwrap());
    let request = Download { attempts: 1, ..Download::new(&url).unwrap() };
    download(&request, Path::new(&to), &Silent).unwrap();
}

fn helper(url: &str, to: &Path) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    // The proxies of whoever runs the tests.
    for name in ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    command
        .args(["--exact", "source::download::tests::helper_downloads_in_a_process_of_its_own", "--ignored"])
        .env("KILN_TEST_URL", url)
        .env("KILN_TEST_TO", to)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null());
    command
}

#[test]
fn c10_a_killed_download_leaves_only_its_part_and_the_next_goes_on() {
    let whole = bytes(TAGGED, &body());
    let silent = Answer::Stall(whole[..whole.len() - body().len() + 1000].to_vec());
    let rest = "206 Partial Content\r\nContent-Range: bytes 1000-200003/200004";
    let (server, target) = (Server::new(vec![silent, send(rest, &body()[1000..])]), Target::new());
    let part = target.folder.path().join("downloads/source.tar.gz.part");
    let mut child = helper(&server.url(), &target.path()).spawn().unwrap();
    let has_written = || fs_err::metadata(&part).is_ok_and(|metadata| metadata.len() == 1000);
    let written = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        has_written()
    });
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(written);
    assert_eq!(target.names(), ["source.tar.gz.part", "source.tar.gz.part.etag"]);
    assert_eq!(target.get(&server.request()).unwrap().resumed_at, 1000);
    assert_eq!(fs_err::read(target.path()).unwrap(), body());
    assert_eq!(target.names(), ["source.tar.gz"]);
}

#[test]
fn the_proxy_variables_are_honoured_except_for_this_machine() {
    let (proxy, target) = (Server::new(vec![send("403 Forbidden", b"")]), Target::new());
    let variable = format!("http://127.0.0.1:{}", proxy.port);
    helper("https://example.invalid/x", &target.path()).env("HTTPS_PROXY", &variable).status().unwrap();
    assert!(proxy.asked()[0].starts_with("connect example.invalid:443 "), "{:?}", proxy.asked());

    let (server, target) = (Server::new(vec![send("200 OK", &body())]), Target::new());
    let status = helper(&server.url(), &target.path()).env("HTTP_PROXY", &variable).status().unwrap();
    assert!(status.success());
    assert_eq!(fs_err::read(target.path()).unwrap(), body());
}

#[test]
fn a_server_without_tls_is_no_https_server() {
    let answers = (0..4).map(|_| send("200 OK", &body())).collect();
    let (server, target) = (Server::new(answers), Target::new());
    let error = target.get(&Download::new(&server.url().replace("http:", "https:")).unwrap()).unwrap_err();
    assert_eq!(error.code().id, UNREACHABLE.id);
    assert!(!target.path().exists());
}

#[test]
fn c10_a_server_that_ignores_the_range_or_has_another_file_starts_over() {
    let server =
        Server::new(vec![cut(TAGGED, &body(), 1000), send("200 OK\r\nETag: \"two\"", &body()[..5000])]);
    let target = Target::new();
    let downloaded = target.get(&server.request()).unwrap();
    assert_eq!(downloaded, Downloaded { bytes: 5000, resumed_at: 0, attempts: 2 });
    assert_eq!(fs_err::read(target.path()).unwrap(), body()[..5000]);
}

#[test]
fn c10_without_a_strong_etag_nothing_is_resumed() {
    for tag in ["200 OK", "200 OK\r\nETag: W/\"one\""] {
        let server = Server::new(vec![cut(tag, &body(), 1000), send("200 OK", &body())]);
        let target = Target::new();
        target.get(&server.request()).unwrap();
        assert_eq!(fs_err::read(target.path()).unwrap(), body());
        assert!(!server.asked()[1].contains("range"));
    }
}

#[test]
fn c10_a_wrong_range_and_an_unsatisfiable_one_start_over() {
    for wrong in [
        "206 Partial Content\r\nContent-Range: bytes 500-200003/200004",
        "206 Partial Content",
        "416 Range Not Satisfiable\r\nContent-Range: bytes */200004",
    ] {
        let server =
            Server::new(vec![cut(TAGGED, &body(), 1000), send(wrong, b"x"), send("200 OK", &body())]);
        let target = Target::new();
        assert_eq!(target.get(&server.request()).unwrap().attempts, 3);
        assert_eq!(fs_err::read(target.path()).unwrap(), body());
        assert!(!server.asked()[2].contains("range"));
    }
}

#[test]
fn c10_the_rest_of_another_address_is_not_used() {
    let server = Server::new(vec![send("200 OK", &body())]);
    let target = Target::new();
    fs_err::create_dir_all(target.path().parent().unwrap()).unwrap();
    fs_err::write(target.folder.path().join("downloads/source.tar.gz.part"), "other").unwrap();
    fs_err::write(
        target.folder.path().join("downloads/source.tar.gz.part.etag"),
        "https://example.org/other\n\"one\"\n",
    )
    .unwrap();
    target.get(&server.request()).unwrap();
    assert_eq!(fs_err::read(target.path()).unwrap(), body());
    assert!(!server.asked()[0].contains("range"));
}

#[test]
fn an_old_file_stays_until_the_new_one_is_whole() {
    let server = Server::new(vec![cut("200 OK", &body(), 10), send("200 OK", &body())]);
    let target = Target::new();
    fs_err::create_dir_all(target.path().parent().unwrap()).unwrap();
    fs_err::write(target.path(), "old").unwrap();
    target.get(&Download { attempts: 1, ..server.request() }).unwrap_err();
    assert_eq!(fs_err::read_to_string(target.path()).unwrap(), "old");
    target.get(&server.request()).unwrap();
    assert_eq!(fs_err::read(target.path()).unwrap(), body());
}

#[test]
fn a_silent_server_is_given_up() {
    let silent = || {
        let whole = bytes("200 OK", &body());
        Answer::Stall(whole[..whole.len() - 100_000].to_vec())
    };
    let server = Server::new(vec![silent(), Answer::Stall(Vec::new())]);
    let target = Target::new();
    // Long enough for the answer of a busy machine, short enough to wait for twice.
    let request = Download { stall: Duration::from_secs(1), attempts: 1, ..server.request() };
    let said = target.get(&request).unwrap_err().to_string();
    assert!(said.contains("went silent for 1 s after 100004 of 200004 bytes"), "{said}");
    let error = target.get(&request).unwrap_err();
    assert_eq!(error.code().id, UNREACHABLE.id);
    assert!(error.to_string().contains("gave no answer in time"), "{error}");
}

#[test]
fn a_body_beyond_the_limit_is_stopped() {
    let chunked = [&b"HTTP/1.1 200 OK\r\n\r\n"[..], &body()].concat();
    // The first is stopped by what it announces.
    for answer in [cut("200 OK", &body(), 100), Answer::Send(chunked)] {
        let (server, target) = (Server::new(vec![answer]), Target::new());
        let error = target.get(&Download { most: 100_000, ..server.request() }).unwrap_err();
        assert_eq!(error.code().id, TOO_LARGE.id);
        assert!(error.message().ends_with("answered 200 OK with more than 100000 bytes"));
        assert_eq!(target.names(), [""; 0]);
    }
}

#[test]
fn redirects_are_followed_within_limits() {
    let there = Server::new(vec![send("200 OK", &body())]);
    let found = format!("302 Found\r\nLocation: {}", there.url());
    let (server, target) = (Server::new(vec![send(&found, b"")]), Target::new());
    target.get(&server.request()).unwrap();
    assert_eq!(fs_err::read(target.path()).unwrap(), body());

    let circle = (0..10).map(|_| send("302 Found\r\nLocation: /archive.tar.gz", b"")).collect();
    let (server, target) = (Server::new(circle), Target::new());
    let said = target.refused(&server, &UNREACHABLE);
    assert!(said.ends_with("more than 5 redirects"), "{said}");
    assert_eq!(target.clock.pauses(), [0; 0]);

    let plain = vec![send("302 Found\r\nLocation: http://example.org/x?token=secret", b"")];
    let (server, target) = (Server::new(plain), Target::new());
    let said = target.refused(&server, &UNREACHABLE);
    assert!(said.ends_with("a redirect to http://example.org/x, which is not https"), "{said}");
}

#[test]
fn a_refused_connection_is_retried_and_then_named() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let target = Target::new();
    let error = target.get(&Download::new(&format!("http://127.0.0.1:{port}/x")).unwrap()).unwrap_err();
    assert_eq!(error.code().id, UNREACHABLE.id);
    assert_eq!(target.clock.pauses(), [1, 3, 9]);
    assert!(error.to_string().contains(&format!("http://127.0.0.1:{port}/x gave no answer")), "{error}");
}

#[test]
fn only_https_and_this_machine_are_accepted() {
    for url in ["http://127.0.0.1/x", "http://[::1]:80/x", "http://localhost/x", "https://example.org/x"] {
        Download::new(url).unwrap();
    }
    for (url, expected) in [
        ("http://example.org/x", "http://example.org/x is not https"),
        ("http://127.0.0.1.example.org/x", "http://127.0.0.1.example.org/x is not https"),
        ("ftp://example.org/x", "ftp://example.org/x is not https"),
        ("file:///etc/passwd", "file:///etc/passwd is not https"),
        ("example.org/x", "\"example.org/x\" is no URL: relative URL without a base"),
        ("https://me:secret@example.org/x", "https://example.org/x has a user name or a password in it"),
    ] {
        let error = Download::new(url).unwrap_err();
        assert_eq!(error.code().id, BAD_ADDRESS.id);
        assert_eq!(error.message(), expected);
    }
}
