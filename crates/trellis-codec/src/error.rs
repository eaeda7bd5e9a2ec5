//! Typed errors. Each prints the whole problem: what was found, what was expected, and where. A reason that another error
//! gave is part of that text, and so no `source`, which whoever prints a chain of errors would print once more.

use std::io;
use std::path::PathBuf;

use half::f16;
use safetensors::Dtype;
use thiserror::Error;

use crate::encode::EncodeLevel;
use crate::format::Geometry;
use crate::rotation::{MAX_ROTATION_BLOCK, MAX_ROTATION_SEED};

/// A geometry that the format does not have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// `k` out of range.
    #[error("bits a weight (k) is {found}, expected 1 to 4")]
    Bits {
        /// The `k` given.
        found: u32,
    },
    /// `L` out of range.
    #[error("state bits (L) is {found}, expected {} to 16 for k={bits}", bits + 1)]
    StateBits {
        /// The `L` given.
        found: u32,
        /// The `k` it goes with.
        bits: u32,
    },
    /// A block that does not fill whole words.
    #[error("block length (T) is {found}, expected T*k a non-zero multiple of 32 for k={bits}")]
    Block {
        /// The `T` given.
        found: usize,
        /// The `k` it goes with.
        bits: u32,
    },
    /// A matrix without elements.
    #[error("stored matrix is {rows}x{cols}, expected at least one row and one block of columns")]
    Empty {
        /// Stored rows.
        rows: usize,
        /// Stored columns.
        cols: usize,
    },
    /// Columns that do not divide into blocks.
    #[error("stored matrix has {found} columns, expected a multiple of the block length {block}")]
    Cols {
        /// Stored columns.
        found: usize,
        /// Block length `T`.
        block: usize,
    },
    /// A matrix whose bits cannot be counted.
    #[error("stored matrix of {rows}x{cols} is too large to address")]
    TooLarge {
        /// Stored rows.
        rows: usize,
        /// Stored columns.
        cols: usize,
    },
    /// A layout that the geometry does not allow.
    #[error(
        "{geometry} cannot be interleaved, expected axis 0, k=3, T=256, L=12 and an even number of blocks a row"
    )]
    Interleave {
        /// The geometry refused.
        geometry: Box<Geometry>,
    },
}

/// A rotation that the format does not have, or one that does not fit its layer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RotationError {
    /// A block that no rotation has.
    #[error("rotation block is {found}, expected a power of two from 2 to {MAX_ROTATION_BLOCK}")]
    Block {
        /// The block given.
        found: usize,
    },
    /// A seed that not every JSON reader holds.
    #[error("rotation seed is {found}, expected at most {MAX_ROTATION_SEED}")]
    Seed {
        /// The seed given.
        found: u64,
    },
    /// A block that does not divide the input features.
    #[error("rotation block is {block}, expected one that divides the {in_features} input features")]
    Features {
        /// The block given.
        block: usize,
        /// The layer's input features.
        in_features: usize,
    },
}

/// States or codes that do not fit their geometry.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PackError {
    /// A slice of the wrong length.
    #[error("{what} has {found} elements, expected {expected}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length the geometry asks for.
        expected: usize,
    },
    /// A state of more than `L` bits.
    #[error("state {state:#x} of weight {weight} does not fit {state_bits} bits")]
    StateRange {
        /// Index in the block.
        weight: usize,
        /// The state.
        state: u32,
        /// `L`.
        state_bits: u32,
    },
    /// Two neighbours that do not share their bits.
    #[error("state {state:#x} of weight {weight} is followed by {next:#x}, which does not continue it")]
    Broken {
        /// Index in the block of the first of the two.
        weight: usize,
        /// Its state.
        state: u32,
        /// The state after it (the first weight's after the last).
        next: u32,
    },
    /// A geometry that the format does not have.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
}

/// A file or folder that cannot be read as an artifact, or one that cannot be written.
///
/// Every variant of the reader carries the file, the tensor (or the module whose `config.json` entry is at
/// fault), what was found and what was expected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ArtifactError {
    /// The system refused to read or write.
    #[error("{}: cannot {action}: {reason}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// What the system said.
        reason: io::Error,
    },
    /// A folder without weights.
    #[error("{}: found {found}, expected model.safetensors or model.safetensors.index.json", path.display())]
    NoWeights {
        /// The folder.
        path: PathBuf,
        /// Its safetensors files.
        found: String,
    },
    /// A `config.json` or index that is not the JSON it should be.
    #[error("{}: found {found}, expected {expected}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// What it holds, or what the parser said.
        found: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A file that is not safetensors, or one cut short.
    #[error("{}: found {found}, expected {expected}", file.display())]
    Safetensors {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A safetensors header whose description of one tensor is wrong.
    #[error("{}: header of tensor {tensor}: found {found}, expected {expected}", file.display())]
    TensorHeader {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What the header says.
        found: String,
        /// What it should say.
        expected: String,
    },
    /// A shard that is not a plain file name: it would be read from outside the folder.
    #[error(
        "{}: tensor {tensor} is in shard {found:?}, expected the name of a file in the same folder",
        file.display()
    )]
    ShardName {
        /// The index.
        file: PathBuf,
        /// The tensor listed for it.
        tensor: String,
        /// The shard.
        found: String,
    },
    /// A shard named by the index that is not on disk.
    #[error(
        "{}: tensor {tensor} is in shard {shard}: found no such file, expected {}",
        file.display(), expected.display()
    )]
    MissingShard {
        /// The index.
        file: PathBuf,
        /// The first tensor listed for it.
        tensor: String,
        /// The shard.
        shard: String,
        /// Where it should be.
        expected: PathBuf,
    },
    /// An index that does not describe the shards on disk.
    #[error("{}: stale index: tensor {tensor}: found {found}, expected {expected}", file.display())]
    StaleIndex {
        /// The index.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where the tensor is.
        found: String,
        /// Where the index says it is.
        expected: String,
    },
    /// A shard on disk that is not part of the model: other readers would load it.
    #[error(
        "{}: found {found}, expected no model shard that the index (or model.safetensors alone) does not name",
        file.display()
    )]
    UnlistedShard {
        /// The index, or `model.safetensors`.
        file: PathBuf,
        /// The shard's file name.
        found: String,
    },
    /// A key of a trellis entry that this version does not know, and so must not ignore.
    #[error("{}: module {module}: found unknown key {found:?}, expected only {expected}", file.display())]
    EntryKey {
        /// The `config.json`.
        file: PathBuf,
        /// The module.
        module: String,
        /// The key.
        found: String,
        /// The keys known.
        expected: &'static str,
    },
    /// A key of a trellis entry that is missing or has a value of the wrong kind.
    #[error("{}: module {module}: {key}: found {found}, expected {expected}", file.display())]
    EntryValue {
        /// The `config.json`.
        file: PathBuf,
        /// The module (or `quantization` for the top level).
        module: String,
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A `code` other than "1mad" and "1mad-hadamard".
    #[error(
        "{}: module {module}: code: found {found:?}, expected \"1mad\" or \"1mad-hadamard\"",
        file.display()
    )]
    Code {
        /// The `config.json`.
        file: PathBuf,
        /// The module.
        module: String,
        /// The code.
        found: String,
    },
    /// `k`, `L` or `T` out of range.
    #[error("{}: module {module}: {reason}", file.display())]
    Parameters {
        /// The `config.json`.
        file: PathBuf,
        /// The module.
        module: String,
        /// The parameter, what was found and what was expected.
        reason: GeometryError,
    },
    /// A rotation out of range, or one that does not fit the module.
    #[error("{}: module {module}: {reason}", file.display())]
    Rotation {
        /// The `config.json`.
        file: PathBuf,
        /// The module.
        module: String,
        /// What was found and what was expected.
        reason: RotationError,
    },
    /// Two entries for the same module that contradict each other.
    #[error("{}: module {module}: found {found}, expected {expected}", file.display())]
    EntriesDisagree {
        /// The `config.json`.
        file: PathBuf,
        /// The module, as the first entry names it.
        module: String,
        /// What the second entry says, and where.
        found: String,
        /// What the first entry says.
        expected: String,
    },
    /// A trellis entry without codes.
    #[error(
        "{}: tensor {tensor}: found no such tensor, expected codes, as config.json says the module is trellis",
        file.display()
    )]
    MissingCodes {
        /// The file or folder.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Codes without scales.
    #[error(
        "{}: tensor {tensor}: found no such tensor, expected float16 scales of shape [{expected}]",
        file.display()
    )]
    MissingScales {
        /// The file that holds the codes.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Rows of the codes.
        expected: usize,
    },
    /// A tensor of a trellis module that the format does not have, and so must not be ignored.
    #[error("{}: tensor {tensor}: found beside trellis module {module}, expected only {expected}", file.display())]
    UnknownTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The module.
        module: String,
        /// The tensors a module may have.
        expected: String,
    },
    /// Codes that are not uint32.
    #[error("{}: tensor {tensor}: found dtype {found}, expected U32", file.display())]
    CodesDtype {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        found: Dtype,
    },
    /// Codes that are neither 2-D nor 3-D.
    #[error(
        "{}: tensor {tensor}: found shape {found:?}, expected [rows, words] or [cols/512, rows, 48]",
        file.display()
    )]
    CodesRank {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
    },
    /// Rows of codes that do not hold a whole number of weights.
    #[error(
        "{}: tensor {tensor}: found shape {found:?}, expected words * 32 to be a multiple of bits {bits}",
        file.display()
    )]
    CodesBits {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// `k` in `config.json`.
        bits: u32,
    },
    /// Rows of codes that do not hold a whole number of blocks.
    #[error(
        "{}: tensor {tensor}: found shape {found:?}, which is {cols} columns at bits {bits}, expected a multiple \
         of the group size {block}",
        file.display()
    )]
    CodesBlocks {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// Columns that follow from it.
        cols: usize,
        /// `k` in `config.json`.
        bits: u32,
        /// `T` in `config.json`.
        block: usize,
    },
    /// 3-D codes that are not of the interleaved shape, or of a module that cannot be interleaved.
    #[error(
        "{}: tensor {tensor}: found shape {found:?} with {parameters}, expected 3-D codes only as \
         [cols/512, rows, 48] with axis 0, bits 3, group_size 256, L 12",
        file.display()
    )]
    CodesInterleave {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// What `config.json` says of the module.
        parameters: String,
    },
    /// A shape of codes that makes no matrix.
    #[error("{}: tensor {tensor}: found shape {found:?}: {reason}", file.display())]
    CodesGeometry {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// What is wrong and what was expected.
        reason: GeometryError,
    },
    /// Scales that are not float16.
    #[error("{}: tensor {tensor}: found dtype {found}, expected F16", file.display())]
    ScalesDtype {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        found: Dtype,
    },
    /// Scales that are not one for each stored row.
    #[error("{}: tensor {tensor}: found shape {found:?}, expected [{expected}]", file.display())]
    ScalesShape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// Stored rows.
        expected: usize,
    },
    /// A scale that is NaN or infinite.
    #[error("{}: tensor {tensor}: row {row}: found scale {found}, expected a finite number", file.display())]
    ScaleNotFinite {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The row.
        row: usize,
        /// The scale.
        found: f16,
    },
    /// A bias that is not one number for each output feature.
    #[error("{}: tensor {tensor}: found shape {found:?}, expected [{expected}]", file.display())]
    BiasShape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// Output features.
        expected: usize,
    },
    /// A module asked for that the artifact does not have.
    #[error("{}: module {module}: found {found} trellis modules without it, expected it", file.display())]
    NoModule {
        /// The file or folder.
        file: PathBuf,
        /// The module.
        module: String,
        /// How many trellis modules there are.
        found: usize,
    },
    /// A tensor asked for that the files do not have.
    #[error("{}: tensor {tensor}: found no such tensor, expected it", file.display())]
    NoTensor {
        /// The file or folder.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A destination that cannot name a file or folder.
    #[error("{}: found no name at its end, expected one", path.display())]
    Destination {
        /// The destination.
        path: PathBuf,
    },
    /// A destination that is there already.
    #[error("{}: found it there already, expected a new path (or leave to overwrite)", path.display())]
    Exists {
        /// The destination.
        path: PathBuf,
    },
    /// A destination to overwrite that is not an artifact.
    #[error("{}: found {found}, expected an artifact's folder to overwrite (one with a config.json)", path.display())]
    NotAnArtifact {
        /// The destination.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// Data of the wrong length given to the writer.
    #[error("{}: tensor {tensor}: found {found} bytes, expected {expected}", file.display())]
    Length {
        /// The destination.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Bytes given.
        found: u128,
        /// Bytes that shape and dtype ask for.
        expected: u128,
    },
    /// A tensor, module or file given to the writer twice, or under a name that the writer keeps for itself.
    #[error("{}: found {found} given twice or reserved, expected another name", file.display())]
    Name {
        /// The destination.
        file: PathBuf,
        /// The name.
        found: String,
    },
    /// A source model quantized by a scheme that the file could not describe any more.
    #[error(
        "{}: quantization_config: found quant_method {found}, expected an unquantized model or an mlx one",
        file.display()
    )]
    ForeignQuantization {
        /// The destination.
        file: PathBuf,
        /// The `quant_method`.
        found: String,
    },
    /// A writer that failed before: what it holds is not whole.
    #[error("{}: found an earlier write that failed, expected a fresh writer", file.display())]
    Abandoned {
        /// The destination.
        file: PathBuf,
    },
}

/// Second moments that cannot be used.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum HessianError {
    /// The wrong number of moments.
    #[error("Hessian has {found} elements, expected {in_features}x{in_features}")]
    Length {
        /// Moments given.
        found: usize,
        /// Input features.
        in_features: usize,
    },
    /// NaN or infinity among the moments.
    #[error("Hessian at row {row}, column {col} is {value}, expected a finite number")]
    NotFinite {
        /// Row.
        row: usize,
        /// Column.
        col: usize,
        /// The moment.
        value: f64,
    },
    /// Moments of another layer's inputs.
    #[error("Hessian is of {found} input features, expected {in_features}")]
    Features {
        /// Input features of the moments.
        found: usize,
        /// Input features of the layer.
        in_features: usize,
    },
}

/// Weights that cannot be encoded.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The wrong number of weights.
    #[error("tensor {tensor:?}: found {found} weights, expected {rows}x{cols}")]
    Weights {
        /// The tensor's name.
        tensor: String,
        /// Weights given.
        found: u128,
        /// Rows expected.
        rows: usize,
        /// Columns expected.
        cols: usize,
    },
    /// NaN or infinity among the weights.
    #[error("tensor {tensor:?}: weight at row {row}, column {col} is {value}, expected a finite number")]
    NotFinite {
        /// The tensor's name.
        tensor: String,
        /// Row of the stored matrix.
        row: usize,
        /// Column of the stored matrix.
        col: usize,
        /// The weight.
        value: f32,
    },
    /// A row too large for a binary16 scale.
    #[error(
        "tensor {tensor:?}: row {row} has rms {rms:e}, expected one whose scale is finite in binary16 (up to 65504)"
    )]
    ScaleOverflow {
        /// The tensor's name.
        tensor: String,
        /// Row of the stored matrix.
        row: usize,
        /// The row's root mean square.
        rms: f64,
    },
    /// Second moments that are none of this tensor's inputs.
    #[error("tensor {tensor:?}: {reason}")]
    Hessian {
        /// The tensor's name.
        tensor: String,
        /// What is wrong with them.
        reason: HessianError,
    },
    /// Instructions that were asked for and that this machine does not have.
    #[error("encode level {level:?} is not available on this machine")]
    LevelUnavailable {
        /// The level.
        level: EncodeLevel,
    },
}
