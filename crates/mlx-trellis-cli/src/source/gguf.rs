//! GGUF files: the metadata, and tensors read one at a time.
//!
//! The layout is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian: header, metadata, tensor
//! descriptions, padding, data. A parser of our own because mlx-rs loads a whole file at once and candle-core takes
//! minutes to build; it reads the unquantized types and the plain 32-weight blocks (`ggml-common.h`), and names any
//! other. Nothing is believed that the file's length does not bear out.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use mlx_trellis::{bf16, f16};
use trellis_codec::artifact::Dtype;

use super::Values;

/// Alignment of tensor data where `general.alignment` does not say otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Weights in a block of Q4_0, Q4_1 and Q8_0.
const BLOCK: usize = 32;
/// ggml has no tensor of more dimensions.
const MAX_DIMS: u32 = 4;

/// A type of tensor that this parser decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GgmlType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q8_0,
}

impl GgmlType {
    fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
        }
    }

    /// Whether it is a code rather than numbers.
    pub(crate) fn is_quantized(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Q8_0)
    }

    /// The type in which its numbers are exact.
    pub(crate) fn dtype(self) -> Dtype {
        match self {
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
            _ => Dtype::F32,
        }
    }

    /// Weights and bytes of a block.
    fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (BLOCK, 18),
            Self::Q4_1 => (BLOCK, 20),
            Self::Q8_0 => (BLOCK, 34),
        }
    }

    fn decode(self, bytes: &[u8]) -> Values {
        match self {
            Self::F32 => Values::F32(numbers(bytes, f32::from_le_bytes)),
            Self::F16 => Values::F16(numbers(bytes, f16::from_le_bytes)),
            Self::Bf16 => Values::Bf16(numbers(bytes, bf16::from_le_bytes)),
            Self::Q4_0 => blocks::<18>(bytes, |block, out| {
                let scale = half(block, 0);
                nibbles(&block[2..], out, |q| scale * (f32::from(q) - 8.0));
            }),
            Self::Q4_1 => blocks::<20>(bytes, |block, out| {
                let (scale, least) = (half(block, 0), half(block, 2));
                nibbles(&block[4..], out, |q| scale * f32::from(q) + least);
            }),
            Self::Q8_0 => blocks::<34>(bytes, |block, out| {
                let scale = half(block, 0);
                for (out, &q) in out.iter_mut().zip(&block[2..]) {
                    *out = scale * f32::from(q as i8);
                }
            }),
        }
    }
}

/// The names of the types that are refused, by their number in `ggml.h`.
fn type_name(id: u32) -> String {
    let name = match id {
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16..=23 | 29 => "an IQ type",
        24..=27 => "an integer type",
        28 => "F64",
        34 | 35 => "a ternary type",
        39 => "MXFP4",
        _ => return format!("type {id}"),
    };
    name.to_owned()
}

fn numbers<const N: usize, T>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&c| from(c)).collect()
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn blocks<const N: usize>(bytes: &[u8], decode: impl Fn(&[u8; N], &mut [f32])) -> Values {
    let (blocks, _) = bytes.as_chunks::<N>();
    let mut out = vec![0.0; blocks.len() * BLOCK];
    for (block, out) in blocks.iter().zip(out.chunks_exact_mut(BLOCK)) {
        decode(block, out);
    }
    Values::F32(out)
}

/// The low halves of the bytes are the first 16 weights, the high halves the others.
fn nibbles(bytes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(BLOCK / 2);
    for ((&byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = value(byte & 15);
        *high = value(byte >> 4);
    }
}

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    Integers(Vec<i64>),
    /// An array that no reader of ours asks for.
    Other,
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::String(_) => "a string",
            Self::Strings(_) => "an array of strings",
            Self::Integers(_) => "an array of integers",
            Self::Other => "another array",
        }
    }
}

/// A tensor's description.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    /// Row-major, the contiguous dimension last; GGUF lists it first.
    pub(crate) shape: Vec<usize>,
    pub(crate) ggml_type: GgmlType,
    /// Of its data in the file.
    start: u64,
    bytes: usize,
}

/// An open GGUF file, its header read.
pub(crate) struct Gguf {
    path: PathBuf,
    file: File,
    metadata: BTreeMap<String, Value>,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl Gguf {
    /// Reads the header of a file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let open = || -> Result<Self> {
            let file = File::open(path)?;
            let length = file.metadata()?.len();
            let mut reader = Reader { input: BufReader::new(&file), at: 0, length };
            let (metadata, tensors) = reader.header()?;
            Ok(Self { path: path.to_owned(), file, metadata, tensors })
        };
        open().with_context(|| format!("{}", path.display()))
    }

    /// The numbers of a tensor, row-major.
    pub(crate) fn read(&self, name: &str) -> Result<Values> {
        let read = || -> Result<Values> {
            let tensor = self.tensors.get(name).context("no such tensor")?;
            let mut bytes = vec![0; tensor.bytes];
            let mut file = &self.file;
            file.seek(SeekFrom::Start(tensor.start))?;
            file.read_exact(&mut bytes)?;
            Ok(tensor.ggml_type.decode(&bytes))
        };
        read().with_context(|| format!("{}: tensor {name}", self.path.display()))
    }

    /// A whole number of the metadata, if it is there.
    pub(crate) fn integer(&self, key: &str) -> Result<Option<u64>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(n)) => Ok(Some(*n)),
            Some(Value::Signed(n)) if *n >= 0 => Ok(Some(*n as u64)),
            Some(other) => bail!("{key} is {}, expected a whole number, zero or more", other.kind()),
        }
    }

    /// A floating-point number of the metadata, if it is there.
    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a float", |v| match v {
            Value::Float(x) => Some(*x),
            _ => None,
        })
    }

    /// A boolean of the metadata, if it is there.
    pub(crate) fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a boolean", |v| match v {
            Value::Bool(b) => Some(*b),
            _ => None,
        })
    }

    /// A string of the metadata, if it is there.
    pub(crate) fn string(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |v| match v {
            Value::String(s) => Some(s.as_str()),
            _ => None,
        })
    }

    /// An array of strings of the metadata, if it is there.
    pub(crate) fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "an array of strings", |v| match v {
            Value::Strings(s) => Some(s.as_slice()),
            _ => None,
        })
    }

    /// An array of integers of the metadata, if it is there.
    pub(crate) fn integers(&self, key: &str) -> Result<Option<&[i64]>> {
        self.typed(key, "an array of integers", |v| match v {
            Value::Integers(n) => Some(n.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        get: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        match get(value) {
            Some(value) => Ok(Some(value)),
            None => bail!("{key} is {}, expected {expected}", value.kind()),
        }
    }
}

/// Reads a header, never further than the file goes.
struct Reader<'a> {
    input: BufReader<&'a File>,
    at: u64,
    length: u64,
}

impl Reader<'_> {
    fn header(&mut self) -> Result<(BTreeMap<String, Value>, BTreeMap<String, Tensor>)> {
        let magic = self.bytes::<4>("the magic number")?;
        ensure!(&magic == b"GGUF", "starts with {magic:?}, expected GGUF");
        let version = self.u32("the version")?;
        ensure!((2..=3).contains(&version), "GGUF version is {version}, expected 2 or 3, little-endian");
        let tensor_count = self.u64("the number of tensors")?;
        let pairs = self.u64("the number of metadata values")?;
        let mut metadata = BTreeMap::new();
        for _ in 0..pairs {
            let key = self.string("a metadata key")?;
            let kind = self.u32(&key)?;
            let value = self.value(kind, &key)?;
            ensure!(!metadata.contains_key(&key), "metadata has {key} twice");
            metadata.insert(key, value);
        }
        let mut found = Vec::new();
        for _ in 0..tensor_count {
            let name = self.string("a tensor's name")?;
            let tensor = self.tensor(&name).with_context(|| format!("tensor {name}"))?;
            found.push((name, tensor));
        }
        let alignment = match metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(Value::Unsigned(n)) if *n >= 8 && n.is_multiple_of(8) => *n,
            Some(other) => bail!("general.alignment is {other:?}, expected a multiple of 8"),
        };
        let data = self.at.next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for (name, mut tensor) in found {
            let end = data.checked_add(tensor.start).and_then(|n| n.checked_add(tensor.bytes as u64));
            ensure!(
                tensor.start.is_multiple_of(alignment) && end.is_some_and(|end| end <= self.length),
                "tensor {name}: data of {} bytes from byte {} of the data section, expected a multiple of {alignment} \
                 that ends within the file's {} bytes",
                tensor.bytes,
                tensor.start,
                self.length
            );
            tensor.start += data;
            ensure!(tensors.insert(name.clone(), tensor).is_none(), "tensor {name} is there twice");
        }
        Ok((metadata, tensors))
    }

    fn tensor(&mut self, name: &str) -> Result<Tensor> {
        let dims = self.u32(name)?;
        ensure!((1..=MAX_DIMS).contains(&dims), "{dims} dimensions, expected 1 to {MAX_DIMS}");
        let mut shape = Vec::new();
        for _ in 0..dims {
            shape.push(usize::try_from(self.u64(name)?)?);
        }
        let id = self.u32(name)?;
        let Some(ggml_type) = GgmlType::from_id(id) else {
            bail!("type is {}, expected F32, F16, BF16, Q4_0, Q4_1 or Q8_0", type_name(id));
        };
        let (weights, bytes) = ggml_type.block();
        ensure!(
            shape[0].is_multiple_of(weights),
            "rows of {} weights, expected a multiple of {weights} for {}",
            shape[0],
            ggml_type.name()
        );
        let bytes = shape
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .and_then(|n| (n / weights).checked_mul(bytes))
            .with_context(|| format!("shape {shape:?}, too large to address"))?;
        shape.reverse();
        Ok(Tensor { shape, ggml_type, start: self.u64(name)?, bytes })
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value> {
        Ok(match kind {
            0 => Value::Unsigned(self.bytes::<1>(key)?[0].into()),
            1 => Value::Signed((self.bytes::<1>(key)?[0] as i8).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.bytes(key)?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.bytes(key)?).into()),
            4 => Value::Unsigned(self.u32(key)?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.bytes(key)?).into()),
            6 => Value::Float(shortest(f32::from_le_bytes(self.bytes(key)?))),
            7 => Value::Bool(self.bytes::<1>(key)?[0] != 0),
            8 => Value::String(self.string(key)?),
            9 => {
                let kind = self.u32(key)?;
                let count = self.u64(key)?;
                self.array(kind, count, key)?
            }
            10 => Value::Unsigned(self.u64(key)?),
            11 => Value::Signed(i64::from_le_bytes(self.bytes(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.bytes(key)?)),
            _ => bail!("{key} has type {kind}, expected 0 to 12"),
        })
    }

    fn array(&mut self, kind: u32, count: u64, key: &str) -> Result<Value> {
        ensure!(kind != 9, "{key} is an array of arrays, expected none");
        // Every element takes a byte at least.
        ensure!(count <= self.length - self.at, "{key} has {count} elements, more than the file has bytes");
        let (mut strings, mut integers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            match self.value(kind, key)? {
                Value::String(s) => strings.push(s),
                Value::Signed(n) => integers.push(n),
                Value::Unsigned(n) => integers.push(i64::try_from(n)?),
                _ => {}
            }
        }
        Ok(match kind {
            8 => Value::Strings(strings),
            0..=5 | 10 | 11 => Value::Integers(integers),
            _ => Value::Other,
        })
    }

    fn string(&mut self, what: &str) -> Result<String> {
        let length = self.u64(what)?;
        ensure!(
            length <= self.length - self.at,
            "{what} is a string of {length} bytes, more than the {} left of the file",
            self.length - self.at
        );
        let mut bytes = vec![0; usize::try_from(length)?];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).with_context(|| format!("{what} is not UTF-8"))
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes(what)?))
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8], what: &str) -> Result<()> {
        self.input
            .read_exact(bytes)
            .with_context(|| format!("the header ends after {} bytes, in {what}", self.at))?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}

/// A binary32 as the decimal that stands for it: `1e-5` was meant, not `9.999999747378752e-6`.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(x.into())
}
