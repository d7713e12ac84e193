use proptest::prelude::*;

use super::*;

const REAL: &str = include_str!("../../../tests/fixtures/ptx/dot_product_sm_90_llc22.ptx");

/// Two entries, a shared function with a counter in every generated name, and a table in memory.
fn module(first: usize) -> String {
    let entry = |name: &str, number: usize| {
        format!(
            r#"
	// .globl	{name}                   // -- Begin function {name}
.visible .entry {name}(
	.param .u64 .ptr .global .align 1 {name}_param_0,
	.param .u32 {name}_param_1
)
.maxntid 256
{{
	.local .align 8 .b8 	__local_depot{number}[16];
	.reg .pred 	%p<2>;
	.reg .b32 	%r<4>;
	.loc	1 2 3
$L__tmp{number}:
	ld.param.b32 	%r1, [{name}_param_1]; // a comment
$L__BB{number}_1:
	@!%p1 bra 	$L__BB{number}_1;
	ld.global.v2.b32 	{{%r2, %r3}}, [table_{number}+4];
	{{ // callseq {number}, 0
	.param .b32 param0;
	call.uni 	_ZN6helper{number}E, (param0);
	}} // callseq {number}
	// begin inline asm
	fma.rn.f32 %r1, %r2, %r3, %r1;
	// end inline asm
	ret;
                                        // -- End function
}}
"#
        )
    };
    let helper = |number: usize| {
        format!(
            ".func _ZN6helper{number}E(.param .b32 _ZN6helper{number}E_param_0)\n{{\n\tadd.s32 \t%r1, %r1, 1;\n\tret;\n}}\n.global .align 4 .b8 table_{number}[8] = {{1, 2, 3, 4, 0x05, 6, 7, 8}};\n"
        )
    };
    format!(
        ".version 7.8\n.target sm_90, debug\n.address_size 64\n.file 1 \"/a//b;{{.rs\"\n{}{}{}{}.section .debug_abbrev\n{{\n.b8 1\n}}\n",
        helper(first),
        entry("a", first),
        helper(first + 1),
        entry("b", first + 1)
    )
}

#[test]
fn an_entry_does_not_change_when_another_one_moves_it() {
    let (one, two) = (Listing::parse(&module(0)), Listing::parse(&module(7)));
    let names: Vec<_> = one.entries.keys().cloned().collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(one.entries, two.entries);
    // The two entries are the same but for their names.
    assert_eq!(one.entries["a"].digest(), one.entries["b"].digest());
}

#[test]
fn the_canonical_text_holds_what_the_entry_reaches() {
    insta::assert_snapshot!(Listing::parse(&module(3)).entries["b"].canonical, @"
        .visible .entry $E ( .param .u64 .ptr .global .align 1 $L0 , .param .u32 $L1 ) .maxntid 256
        {
        .local .align 8 .b8 $L2 [ 16 ] ;
        .reg .pred %p < 2 > ;
        .reg .b32 %r < 4 > ;
        ld.param.b32 %r1 , [ $L1 ] ;
        $L3 : @ ! %p1 bra $L3 ;
        ld.global.v2.b32 { %r2 , %r3 } , [ $S1 + 4 ] ;
        { .param .b32 $L4 ;
        call.uni $S2 , ( $L4 ) ;
        } fma.rn.f32 %r1 , %r2 , %r3 , %r1 ;
        ret ;
        }
        .global .align 4 .b8 $S1 [ 8 ] = { 1 , 2 , 3 , 4 , 0x05 , 6 , 7 , 8 }
        ;
        .func $S2 ( .param .b32 $L0 )
        {
        add.s32 %r1 , %r1 , 1 ;
        ret ;
        }
        ");
}

#[test]
fn everything_that_counts_changes_the_digest() {
    let text = module(0);
    let digest = |text: &str| Listing::parse(text).entries["a"].digest();
    let before = digest(&text);
    for (from, to) in [
        ("fma.rn.f32 %r1, %r2, %r3, %r1", "fma.rn.f32 %r1, %r3, %r2, %r1"),
        ("@!%p1 bra", "@%p1 bra"),
        (".maxntid 256", ".maxntid 128"),
        ("0x05, 6", "0x05, 5"),
        ("__local_depot0[16]", "__local_depot0[32]"),
        ("add.s32 \t%r1, %r1, 1", "add.s32 \t%r1, %r1, 2"),
        ("ld.global.v2.b32", "ld.global.nc.v2.b32"),
        (".reg .b32 \t%r<4>", ".reg .b32 \t%r<5>"),
    ] {
        assert!(text.contains(from), "{from}");
        assert_ne!(digest(&text.replace(from, to)), before, "{to}");
    }
    for (from, to) in [
        (".version 7.8", ".version 8.0"),
        ("// a comment", "/* another\none */"),
        ("\t.loc\t1 2 3\n", ""),
        ("$L__tmp0:\n", ""),
        ("table_0", "anon.17"),
        ("_ZN6helper0E", "_ZN6helper17h0E"),
    ] {
        assert!(text.contains(from), "{from}");
        assert_eq!(digest(&text.replace(from, to)), before, "{to}");
    }
}

#[test]
fn instructions_are_counted_by_class() {
    let listing = Listing::parse(&module(0));
    let mix = &listing.entries["a"].mix();
    let shown: Vec<_> = mix.iter().map(|(class, count)| format!("{class} {count}")).collect();
    assert_eq!(shown, ["bra 1", "call 1", "fma.rn.f32 1", "int 1", "ld.global 1", "ld.param 1", "ret 2"]);
    let shapes: Vec<_> = listing.entries["a"].instructions.iter().map(|one| one.shape.as_str()).collect();
    assert_eq!(shapes[1], "@ ! %p $L");
    assert_eq!(shapes[2], "{ %r , %r } , [ $S1 + 4 ]");
    assert_eq!(class("cp.async.cg.shared.global.L2::128B"), "cp.shared");
    assert_eq!(class("cp.async.bulk.shared::cluster.global"), "cp.shared");
    assert_eq!(class("cvt.rn.f32.s32"), "cvt.rn.f32.s32");
    assert_eq!(class("cvt.u64.u32"), "int");
    assert_eq!(
        class("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"),
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
    );
    assert_eq!(class("setp.lt.f32"), "setp");
    assert_eq!(class("ld.b32"), "ld");
}

#[test]
fn real_ptx_of_llc_22_is_read() {
    let listing = Listing::parse(REAL);
    let entry = &listing.entries["k"];
    let float: Vec<_> = entry.mix().into_keys().filter(|class| class.contains("f32")).collect();
    assert_eq!(float, ["add.rn.f32", "mul.rn.f32", "sub.rn.f32"]);
    let lines = REAL.lines().map(str::trim);
    let written = lines.filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase() || c == '@'));
    assert_eq!(entry.instructions.len(), written.count());
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC*|([.](extern|func|entry|global|target|version|param|local)|[a-z(){}:;,@!%$/*\"\n .0-9])*") {
        let _ = Listing::parse(&text);
    }
}
