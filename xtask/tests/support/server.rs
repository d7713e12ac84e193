//! A server on this machine that gives prepared answers, the last one again and again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

/// Listens until the test program ends.
pub struct Server {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Answers the connections with `answers`, in order.
    pub fn new(answers: Vec<Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        std::thread::spawn(move || {
            let mut answers = answers.into_iter().peekable();
            let mut last = Vec::new();
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
                seen.lock().unwrap().push(head.first().cloned().unwrap_or_default());
                if let Some(answer) = answers.next() {
                    last = answer;
                }
                // The client may be gone already.
                let _ = stream.write_all(&last);
            }
        });
        Server { port, asked }
    }

    /// The repository's address.
    pub fn repository(&self) -> String {
        format!("http://127.0.0.1:{}/x", self.port)
    }

    /// The first line of every request so far.
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

/// An answer with this status line and headers, and a body of the right length.
pub fn answer(head: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}
