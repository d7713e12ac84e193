//! A tar member's extended headers.

use std::io::Read;

use super::stream::{damage, damaged};
use super::{MOST_METADATA, layout, too_big};
use crate::report::error::Result;

/// What pax and GNU headers say about the member that follows.
#[derive(Default)]
pub(super) struct Extended {
    pub(super) name: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
}

/// The whole content of a header that describes other members.
pub(super) fn metadata<R: Read>(entry: &mut tar::Entry<'_, R>) -> Result<Vec<u8>> {
    if entry.size() > MOST_METADATA {
        return Err(too_big(format!("a metadata header has {} bytes", entry.size())));
    }
    let mut bytes = Vec::new();
    let size = entry.size();
    entry.read_to_end(&mut bytes).map_err(|error| damage(&error))?;
    if bytes.len() as u64 != size {
        return Err(damaged("the archive ends within a header, so it was cut off"));
    }
    Ok(bytes)
}

pub(super) fn long_name<R: Read>(entry: &mut tar::Entry<'_, R>) -> Result<Vec<u8>> {
    let mut name = metadata(entry)?;
    if name.last() == Some(&0) {
        name.pop();
    }
    Ok(name)
}

pub(super) fn local(records: &[u8], extended: &mut Extended) -> Result<()> {
    for (key, value) in pax_records(records)? {
        match key {
            b"path" => extended.name = Some(value.to_vec()),
            b"linkpath" => extended.link = Some(value.to_vec()),
            // Readers disagree about which size counts, and nothing near 8 GiB belongs here.
            b"size" => return Err(layout("a member's size is in a pax header".into())),
            key if key.starts_with(b"GNU.sparse.") => {
                return Err(layout("a member is a sparse file".into()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The records `LENGTH KEY=VALUE\n` of a pax header; the tar crate's own reader splits at newlines in values.
pub(super) fn pax_records(mut rest: &[u8]) -> Result<Vec<(&[u8], &[u8])>> {
    let mut records = Vec::new();
    while !rest.is_empty() {
        let record = (|| {
            let space = rest.iter().take(20).position(|&byte| byte == b' ')?;
            let length: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
            let record = rest.get(space + 1..length)?.strip_suffix(b"\n")?;
            let equals = record.iter().position(|&byte| byte == b'=')?;
            Some((length, (&record[..equals], &record[equals + 1..])))
        })();
        let Some((length, pair)) = record else { return Err(damaged("a pax header is malformed")) };
        records.push(pair);
        rest = &rest[length..];
    }
    Ok(records)
}
