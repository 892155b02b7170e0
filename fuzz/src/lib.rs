//! Damaged files for the fuzz targets.

/// A file that the input describes, by its first byte: the rest of the input; or the valid file with bytes replaced
/// (each three bytes of input are a place and a value); or the valid file with the rest of the input as the JSON text
/// of one metadata entry.
pub fn damaged_file(valid: &[u8], metadata_key: &str, input: &[u8]) -> Vec<u8> {
    let Some((mode, rest)) = input.split_first() else { return Vec::new() };
    match mode % 3 {
        0 => rest.to_vec(),
        1 => {
            let mut file = valid.to_vec();
            for [low, high, value] in rest.as_chunks::<3>().0 {
                let place = usize::from(u16::from_le_bytes([*low, *high]));
                if let Some(byte) = file.get_mut(place) {
                    *byte = *value;
                }
            }
            file
        }
        _ => with_metadata(valid, metadata_key, rest),
    }
}

/// A safetensors file with the text of one metadata entry replaced, as it stands between the quotes of the JSON string.
pub fn with_metadata(valid: &[u8], key: &str, text: &[u8]) -> Vec<u8> {
    let length = u64::from_le_bytes(valid[..8].try_into().expect("eight bytes")) as usize;
    let (header, data) = valid[8..].split_at(length);
    let name = format!("\"{key}\":\"");
    let start =
        header.windows(name.len()).position(|w| w == name.as_bytes()).expect("the file has the key") + name.len();
    let mut end = start;
    while header[end] != b'"' {
        end += if header[end] == b'\\' { 2 } else { 1 };
    }
    let header = [&header[..start], text, &header[end..]].concat();
    [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()
}
