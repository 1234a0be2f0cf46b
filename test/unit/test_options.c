// test_options.c - every option in every spelling, every way to get one wrong and what is suggested then, and --help.
#include "../../llmc/model/training_options.h"
#include "expect_death.h"

typedef struct { Options o; OptionTable table; } Parsed;

static void parse(Parsed* p, const char* const* arguments) {
    char* argv[16] = { (char*)"program" };
    int argc = 1;
    for (; arguments[argc - 1]; argc++) argv[argc] = (char*)arguments[argc - 1];
    p->o = options_defaults();
    p->table = options_table("train_gpt2_test", "a test");
    options_common(&p->table, &p->o);
    options_parse(&p->table, argc, argv);
}
#define parsed(p, ...) do { \
        const char* const arguments_[] = { __VA_ARGS__, NULL }; \
        parse(p, arguments_); \
    } while (0)

// Returns a value that the option accepts and that is not its default.
static const char* some_value(const OptionSpec* s, char* out, size_t size) {
    if (s->kind == OPTION_TEXT) snprintf(out, size, "some=text with --dashes");
    if (s->kind == OPTION_INT) snprintf(out, size, "%.0f", *(long long*)s->value == (long long)s->high ? s->low : s->high);
    if (s->kind == OPTION_FLOAT) snprintf(out, size, "%.17g", s->low + (s->high - s->low) / 3);
    if (s->kind == OPTION_CHOICE) snprintf(out, size, "%s", strrchr(s->form, '|') + 1);
    return out;
}

static void assert_has(const OptionSpec* s, const char* text) {
    char found[128];
    if (s->kind == OPTION_FLOAT) {
        assert_true(*(double*)s->value == strtod(text, NULL));
        return;
    }
    option_format(s, found, sizeof found);
    assert_string_equal(found, s->kind == OPTION_FLAG ? "on" : text);
}
TEST(every_option_takes_a_value_of_its_own_in_every_spelling) {
    Parsed p;
    parsed(&p, NULL);
    const int count = p.table.count;
    assert_true(count > 35);
    for (int i = 0; i < count; i++) {
        parsed(&p, NULL);
        OptionSpec* s = &p.table.specs[i];
        char value[64] = "", name[64], joined[160], letter[3] = { '-', s->letter, 0 };
        assert_int_not_equal(s->letter, 'h'); // that is --help
        some_value(s, value, sizeof value);
        snprintf(name, sizeof name, "--%s", s->name);
        snprintf(joined, sizeof joined, "--%s=%s", s->name, value);
        bool flag = s->kind == OPTION_FLAG;
        for (int spelling = 0; spelling < (s->letter ? 3 : 2); spelling++) {
            if (flag && spelling == 1) continue;
            if (flag) parsed(&p, name);
            else if (spelling == 1) parsed(&p, joined);
            else parsed(&p, spelling == 0 ? name : letter, value);
            assert_has(s, value);
            for (int k = 0; k < count; k++) {
                assert_int_equal(p.table.specs[k].given, k == i); // also if two have one name
                assert_true((p.table.specs[k].value == s->value) == (k == i));
            }
            assert_true(option_given(&p.table, s->name));
        }
    }
}

TEST(the_last_of_several_values_counts_and_a_switch_is_turned_off_by_no) {
    Parsed p;
    parsed(&p, "--steps", "5", "-n", "7", "--lr=1e-4", "--lr", "2e-4", "--out=", "--val-data", "", "--resume", "--no-resume");
    assert_true(p.o.steps == 7 && p.o.lr == 2e-4 && p.o.resume == 0 && option_given(&p.table, "resume"));
    assert_string_equal(p.o.out, "");
    assert_string_equal(p.o.val_data, "");
    parsed(&p, "--no-resume", "--resume");
    assert_int_equal(p.o.resume, 1);
}

TEST(numbers_at_the_ends_of_their_range_are_taken_and_beyond_are_errors) {
    Parsed p, all;
    parsed(&all, NULL);
    for (int i = 0; i < all.table.count; i++) {
        OptionSpec s = all.table.specs[i];
        if (s.kind != OPTION_INT && s.kind != OPTION_FLOAT) continue;
        const char* form = s.kind == OPTION_INT ? "--%s=%.0f" : "--%s=%.17g";
        const double inside[2] = { s.low, s.high };
        bool whole = s.kind == OPTION_INT;
        const double outside[2] = { whole ? s.low - 1 : s.low - 1e-9, whole ? s.high + 1 : s.high * 1.001 };
        for (int end = 0; end < 2; end++) {
            char text[96];
            snprintf(text, sizeof text, form, s.name, inside[end]);
            parsed(&p, text);
            snprintf(text, sizeof text, form, s.name, outside[end]);
            expect_error(parsed(&p, text), s.name, "must be between", strchr(text, '=') + 1);
        }
    }
}

TEST(unknown_options_are_named_and_so_are_bad_values_with_their_option) {
    static const struct { const char *first, *second, *says, *more; } wrong[] = { // an argument, or two, and what the error says
        { "--stepz", "5", "unknown option '--stepz'", "--help" }, { "--stepz=5", NULL, "unknown option '--stepz'", NULL },
        { "--step", "5", "unknown option '--step'", NULL }, // no abbreviations: they would change meaning later
        { "-steps", "5", "unknown option '-steps'", NULL }, { "-x", NULL, "unknown option '-x'", NULL },
        { "steps", NULL, "unknown option 'steps'", NULL },
        { "--", NULL, "unknown option '--'", NULL }, { "", NULL, "unknown option ''", NULL },
        { "--no-steps", NULL, "unknown option '--no-steps'", NULL },
        { "--no-", NULL, "unknown option '--no-'", NULL },
        { "--steps", NULL, "--steps needs a value", "N" }, { "--steps", "ten", "--steps wants a whole number", "'ten'" },
        { "--steps", "10x", "--steps wants a whole number", "'10x'" }, { "--steps", "1.5", "--steps wants a whole number", "'1.5'" },
        { "--steps", " 1", "--steps wants a whole number", "' 1'" }, { "--steps=", NULL, "--steps wants a whole number", "''" },
        { "--steps", "99999999999999999999", "--steps", "99999999999999999999" }, { "--lr", "fast", "--lr wants a number", "'fast'" },
        { "--lr=", NULL, "--lr wants a number", "''" }, { "--lr", "1e-3 ", "--lr wants a number", NULL },
        { "--lr", "nan", "--lr must be between", "nan" },
        { "--lr", "inf", "--lr must be between", "inf" },
        { "--lr-schedule", "cos", "--lr-schedule must be one of cosine|linear|constant|wsd", "'cos'" },
        { "--lr-schedule", "cosine|linear", "--lr-schedule must be one of", "'cosine|linear'" },
        { "--lr-schedule=", NULL, "--lr-schedule must be one of", "''" },
        { "--resume=yes", NULL, "--resume is a switch", "--no-resume turns it off" },
        { "--no-resume=yes", NULL, "--resume is a switch", NULL }
    };
    Parsed p;
    for (size_t i = 0; i < COUNT(wrong); i++)
        expect_error(parsed(&p, wrong[i].first, wrong[i].second), wrong[i].says, wrong[i].more ? wrong[i].more : "");
}

TEST(an_unknown_option_gets_a_suggestion_if_one_is_near) {
    static const char* const near[][2] = { // what is typed, and what may be meant
        { "--stepz", "--steps" }, { "--step", "--steps" }, { "-steps", "--steps" }, { "steps", "--steps" }, { "--stesp=5", "--steps" },
        { "--batch", "--batch-size" }, { "--tot", "--total-batch-size" }, { "--batch_size", "--batch-size" }, { "--lrr", "--lr" },
        { "--totl-btch-size", "--total-batch-size" }, { "--no-resum", "--no-resume" }, { "--no-res", "--no-resume" },
        { "--resuem", "--resume" }, { "--no-steps", "--steps" }
    };
    static const char* const far[] = { "--frobnicate", "--x", "-x", "--", "", "--foo", "--gpus", "--tl", "--steps-of-the-whole-run",
                                       "--a-name-that-is-longer-than-the-name-of-any-option-of-any-program" };
    Parsed p;
    for (size_t i = 0; i < COUNT(near); i++) {
        char says[96];
        snprintf(says, sizeof says, "'; did you mean %s? --help lists them all", near[i][1]);
        expect_error(parsed(&p, near[i][0]), says);
    }
    for (size_t i = 0; i < COUNT(far); i++) expect_error(parsed(&p, far[i]), "'; --help lists them all");
}

TEST(mistakes_of_a_program_file_do_not_go_unseen) {
    Parsed p;
    parsed(&p, NULL);
    expect_error(for (int i = 0; i <= MAX_OPTIONS; i++) option_int(&p.table, "one_more", &p.o.steps, 0, 1, ""), "option table is full");
    expect_error(option_given(&p.table, "stepz"), "no option --stepz");
}

// ---- --help ----
// Copies text with one space wherever it has some, so that it reads as before it was wrapped. The caller frees it.
static char* unwrapped(const char* text) {
    char *out = calloc(strlen(text) + 1, 1), *to = out;
    for (; *text; text++)
        if (!isspace((unsigned char)*text)) *to++ = *text;
        else if (to > out && to[-1] != ' ') *to++ = ' ';
    return out;
}
TEST(help_lists_every_option_with_its_default_and_ends_well) {
    const char* const spellings[] = { "--help", "-h" };
    for (int k = 0; k < 2; k++) {
        Parsed p;
        FREED_BY(child_free) Child c = child_does(parsed(&p, "--steps", "77", spellings[k], "--no-such-option"));
        assert_int_equal(c.status, 0);
        assert_string_equal(c.err, "");
        assert_non_null(strstr(c.out, "train_gpt2_test: a test"));
        char* said = unwrapped(c.out);
        parsed(&p, "--steps", "77");
        for (int i = 0; i < p.table.count; i++) {
            OptionSpec s = p.table.specs[i];
            char value[64], line[512];
            option_format(&s, value, sizeof value);
            const char* quote = s.kind == OPTION_TEXT ? "'" : "";
            snprintf(line, sizeof line, " --%s %s%s%s [%s%s%s] ", s.name, s.form, s.form[0] ? " " : "", s.help, quote, value, quote);
            assert_non_null(strstr(said, line));
        }
        free(said);
    }
}

static void print_groups(bool own, bool shared) {
    long long n = 0;
    int on = 0;
    OptionTable t = options_table("a_program", "one that has a purpose which is too long for a line of eighty columns as it stands");
    if (shared) {
        options_group(&t, "first");
        options_group(&t, "empty");
        options_group(&t, "second");
        option_flag(&t, "is-so", &on, "a switch");
        options_group(&t, "first");
        option_int(&t, "some-number", &n, 0, 9, "help that is too long for the columns to the right of its option's name");
        options_group(&t, NULL);
    }
    if (own) option_int(&t, "a-name-that-leaves-no-room", &n, 0, 9, "help");
    if (own) option_letter(&t, 'a');
    options_help(&t);
}
TEST(help_has_a_programs_own_options_first_then_groups_with_headings_in_lines_of_80_columns) {
    static const char start[] = "a_program: one that has a purpose which is too long for a line of eighty columns\n    as it stands\n\n"
                                "usage: a_program [options]\n\n";
    static const char own[] = "  -a, --a-name-that-leaves-no-room N\n                            help [0]\n\n";
    static const char shared[] = "first:\n"
                                 "  --some-number N           help that is too long for the columns to the right\n"
                                 "                            of its option's name [0]\n\n"
                                 "second:\n"
                                 "  --is-so                   a switch [off]\n\n";
    static const char end[] = "  -h, --help                print this and exit\n\n"
                              "An option with the default [on] or [off] is a switch: --NAME turns it on,\n--no-NAME turns it off.\n";
    char all[1024];
    snprintf(all, sizeof all, "%soptions of a_program:\n%s%s%s", start, own, shared, end);
    expect_output(all, print_groups(true, true));
    snprintf(all, sizeof all, "%s%s%s", start, own, end);
    expect_output(all, print_groups(true, false));
    snprintf(all, sizeof all, "%s%s%s", start, shared, end);
    expect_output(all, print_groups(false, true));
}
